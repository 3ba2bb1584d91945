"""Every task: solved by its solver and by plain Python, at chance for guesses, the same however it is batched."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.tasks.oracles import ORACLES
from twoaxis.data.tasks import UNSCORED, Examples, Task, make_task, task_names
from twoaxis.data.tasks.task import CHUNK, Lookup, bag_accuracy, bag_entropy

NAMES = task_names()
SMALL: dict[str, dict[str, tuple[int, int]]] = {
    "recall": {"pairs": (1, 5), "values": (2, 9), "keys": (5, 7), "key_length": (1, 3)},
    "induction": {"length": (4, 9), "symbols": (2, 7), "order": (1, 3)},
    "multi_hop": {"hops": (1, 3), "entities": (1, 4), "values": (2, 9)},
    "cross_depth": {"hops": (1, 3), "entities": (1, 3), "features": (1, 3), "values": (2, 9)},
    "overwrite": {"keys": (1, 4), "writes": (1, 3), "values": (2, 9)},
    "local": {"window": (1, 4), "symbols": (2, 6), "rule": (0, 9)},
}


@st.composite
def tasks(draw: st.DrawFn, name: str) -> Task:
    options: dict[str, Any] = {key: draw(st.integers(*bounds), label=key) for key, bounds in SMALL[name].items()}
    if name in ("multi_hop", "cross_depth"):
        options["start"] = draw(st.sampled_from(["any", "first"]), label="start")
    task = make_task(name, context=400, **options)
    return make_task(name, context=task.shortest + draw(st.integers(0, 30), label="room"), **options)


def scored(task: Task, count: int, seed: int = 0) -> tuple[Examples, np.ndarray]:
    examples = task.examples(seed, 0, count)
    return examples, examples.labels != UNSCORED


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), seed=st.integers(0, 2**40))
def test_plain_python_and_the_solver_agree_with_the_labels(name: str, data: st.DataObject, seed: int) -> None:
    task = data.draw(tasks(name))
    examples = task.examples(seed, 0, 5)
    assert examples.input_ids.shape == examples.labels.shape == (5, task.context)
    assert examples.input_ids.dtype == examples.labels.dtype == np.int64
    assert examples.input_ids.min() >= 0
    assert max(examples.input_ids.max(), examples.labels.max()) < task.vocab_size
    np.testing.assert_array_equal(task.solve(examples.input_ids), examples.labels)
    for row in range(5):
        words = [task.word(token) for token in examples.input_ids[row].tolist()]
        found = {t: task.word(label) for t, label in enumerate(examples.labels[row].tolist()) if label != UNSCORED}
        assert found == ORACLES[name](words, task)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_answers_depend_on_the_tokens_before_only(name: str, data: st.DataObject) -> None:
    task = data.draw(tasks(name))
    ids = task.examples(3, 0, 8).input_ids
    cut = data.draw(st.integers(1, task.context - 1), label="cut")
    other = ids.copy()
    other[:, cut:] = np.roll(ids, 1, axis=0)[:, cut:]
    facts = task.plan.facts if isinstance(task, Lookup) else 0
    if cut < facts:
        return  # half of one example's facts and half of another's are no example
    np.testing.assert_array_equal(task.solve(other)[:, : cut + 1], task.solve(ids)[:, : cut + 1])


@pytest.mark.parametrize("name", NAMES)
def test_chance_is_chance(name: str) -> None:
    """Every constant guess, and the best guess for each position learnt on other examples, is right 1 / values of the
    time, within five standard errors of examples (questions of one example are not independent)."""
    task = make_task(name)
    assert task.chance == 1 / task.answers
    assert task.chance_loss == pytest.approx(math.log(task.answers), abs=1e-15)
    learn, test = task.examples(1, 0, 2048), task.examples(1, 0, 2048, held_out=True)
    answers = sorted(set(learn.labels[learn.labels != UNSCORED].tolist()))
    assert len(answers) == task.answers
    best = np.array(
        [Counter(column[column != UNSCORED].tolist() or [0]).most_common(1)[0][0] for column in learn.labels.T]
    )
    guesses = [np.full(task.context, answer) for answer in answers] + [best]
    asked = test.labels != UNSCORED
    for guess in guesses:
        right = ((test.labels == guess) & asked).sum(1) - task.chance * asked.sum(1)
        error = right.std() / math.sqrt(len(right)) + 1e-9
        assert abs(right.mean()) < 5 * error, (guess[-1], right.mean() / error)


@pytest.mark.parametrize("name", [n for n in NAMES if make_task(n).bag_chance is not None])
def test_order_blind_guesses_reach_the_bag_and_no_more(name: str) -> None:
    task: Any = make_task(name)
    assert task.chance < task.bag_chance < 0.5
    assert task.bag_loss < task.chance_loss
    examples, asked = scored(task, 4096)
    first = task.tokens("v").start
    right, nats = [], []
    for ids, labels, where in zip(*examples, asked, strict=True):
        count = np.bincount(ids[ids >= first] - first, minlength=task.answers)[: task.answers]
        label = labels[where] - first
        right.append((label == count.argmax()).mean())
        nats.append(-np.log(count[label] / task.stated).mean())
    for found, stated in ((right, task.bag_chance), (nats, task.bag_loss)):
        assert abs(np.mean(found) - stated) < 5 * np.std(found) / math.sqrt(len(found))


@given(stated=st.integers(1, 5), values=st.integers(2, 4))
def test_bag_numbers_by_counting_every_case(stated: int, values: int) -> None:
    cases = np.stack(np.meshgrid(*[np.arange(values)] * stated), -1).reshape(-1, stated)
    shares = np.stack([(cases == value).mean(1) for value in range(values)], -1)
    assert bag_accuracy(stated, values) == pytest.approx(shares.max(-1).mean(), rel=1e-12)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1).mean()
    assert bag_entropy(stated, values) == pytest.approx(entropy, rel=1e-12, abs=1e-15)


def test_bag_numbers_of_many_values_are_those_of_a_normal_distribution() -> None:
    stated = 4096  # of heads and tails
    assert bag_accuracy(stated, 2) == pytest.approx(0.5 + math.sqrt(1 / (2 * math.pi * stated)), rel=1e-6)
    assert bag_entropy(stated, 2) == pytest.approx(math.log(2) - 1 / (2 * stated), rel=1e-6)
    assert bag_accuracy(stated, 2**20) == pytest.approx((2 - math.exp(-(stated**2) / 2**21)) / stated, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_last_token_nor_any_lag_tells_the_answer(name: str) -> None:
    """The best table from (lag, token) to answer, learnt on other examples, stays at chance: nothing leaks.

    A stated value at that distance may be the answer itself, which the bag of tokens accounts for, so tables look at
    other tokens; in induction, where every token is a value, it is with probability 1 / length.
    """
    options = {"local": {"window": 3, "symbols": 4}}.get(name, {})
    task: Any = make_task(name, **options)
    learn, test = task.examples(2, 0, 3072), task.examples(2, 0, 3072, held_out=True)
    limit = task.chance + (1 / task.length if name == "induction" else 0)
    for lag in (1, 2, 3):
        table = np.zeros((task.vocab_size, task.vocab_size), dtype=np.int64)
        pairs = [_lagged(task, part, lag) for part in (learn, test)]
        np.add.at(table, pairs[0], 1)
        token, answer = pairs[1]
        right = (table.argmax(1)[token] == answer).mean()
        assert right < limit + 5 * math.sqrt(limit / 3072), (lag, right)


def _lagged(task: Task, examples: Examples, lag: int) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = examples.input_ids[:, :-lag], examples.labels[:, lag:]
    where = labels != UNSCORED
    if task.stated is not None:
        where &= ~np.isin(ids, task.tokens("v"))
    return ids[where], labels[where]


@pytest.mark.parametrize("name", NAMES)
@given(start=st.integers(0, 3 * CHUNK), count=st.integers(1, 2 * CHUNK), held_out=st.booleans())
def test_batching_does_not_matter(name: str, start: int, count: int, held_out: bool) -> None:
    whole = make_task(name, context=60).examples(5, 0, start + count, held_out=held_out)
    part = make_task(name, context=60).examples(5, start, count, held_out=held_out)
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_array_equal(a[start:], b)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_splits_and_numbers_give_different_examples(name: str) -> None:
    task = make_task(name)
    rows = [
        row.tobytes()
        for seed in (0, 1, 2)
        for held_out in (False, True)
        for row in task.examples(seed, 0, 500, held_out=held_out).input_ids
    ]
    assert len(set(rows)) == len(rows)


EXPECTED = {
    "recall": "k4 v24 k0 v17 k6 v19 k15 v1 k5 v7 k13 v8",
    "induction": "a5 a13 a9 a5 a15 a15 a11 a8 a22 a15 a13 ",
    "multi_hop": "e1 e6 e2 e4 e6 v27 e4 v19 e5 v25 e0 e5 e",
    "cross_depth": "e1 e6 e2 e4 e3 e7 e0 e5 e7 v2 v4 e4 v16 ",
    "overwrite": "k0 v9 k0 v12 k2 v31 k3 v27 k1 v9 k1 v10 ",
    "local": "a2 a3→v0 a1→v0 a0→v0 a2→v6 a6→v2 a2→v0 a",
}


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_what_they_were(name: str) -> None:
    """Results name their task, options and seed; a change in how examples are drawn would make them untrue."""
    task = make_task(name)
    first = task.examples(7, 70, 1)
    assert task.show(first)[:40] == EXPECTED[name]
    first.input_ids[:] = 0  # examples are the caller's own
    assert task.show(task.examples(7, 70, 1))[:40] == EXPECTED[name]
    _, asked = scored(task, 64)
    assert asked.any(axis=1).all()
    assert not asked[:, 0].any()  # nothing stands before the first token
    assert scored(make_task(name, context=task.shortest), 640)[1].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "recal"}, "unknown task 'recal' (did you mean 'recall'?)"),
        ({"name": "recall", "pair": 3}, "recall has no option 'pair' (did you mean 'pairs'?)"),
        ({"name": "recall", "pairs": 2.5}, "pairs must be an integer, got 2.5"),
        ({"name": "recall", "pairs": 20}, "20 pairs need as many different keys; there are 16"),
        ({"name": "recall", "keys": 17, "key_length": 3}, "17 tokens in keys of 3 make 4913 keys; at most 4096"),
        ({"name": "recall", "values": 1}, "values must be at least 2, got 1"),
        ({"name": "recall", "context": 13}, "recall with these options needs a context of at least 14 tokens, got 13"),
        ({"name": "recall", "context": "32"}, "context must be an integer, got '32'"),
        ({"name": "induction", "length": 3, "order": 3}, "length (3) must be more than order (3)"),
        ({"name": "recall", "context": 2**20}, "the context of a task is at most 65,536 tokens, got 1,048,576"),
        ({"name": "induction", "length": 9000, "context": 50_000}, "would compare 40,999 questions with 9,000 tokens"),
        ({"name": "local", "window": 8, "symbols": 2**20}, "is 9,437,184 numbers, more than 4,194,304: give a smaller"),
        ({"name": "multi_hop", "start": "last"}, "unknown start 'last'; it is one of any, first"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    options = dict(options)
    with pytest.raises(ValueError, match=re.escape(message)):
        make_task(options.pop("name"), **options)


@pytest.mark.parametrize("name", NAMES)
def test_counts_have_a_least_value(name: str) -> None:
    task = make_task(name)
    for option, value in task.to_dict().items():
        if isinstance(value, int) and option != "context":
            with pytest.raises(ValueError, match=f"{option} must (be at least|not be negative).*, got -1"):
                make_task(name, **{option: -1})
    for arguments, wrong in (((-1, 0, 1), "seed"), ((0, -1, 1), "start"), ((0, 0, 0), "count"), ((0, 0.5, 1), "start")):
        with pytest.raises(ValueError, match=f"^{wrong} must "):
            task.examples(*arguments)  # type: ignore[arg-type]


def test_words() -> None:
    task = make_task("recall", context=6, pairs=1, keys=2, values=2)
    examples = Examples(np.array([[1, 4, 1, 1, 0, 0]]), np.array([[-100, -100, -100, 4, 4, -100]]))
    assert task.show(examples) == "k0 v1 k0→v1 k0→v1 . ."
    with pytest.raises(ValueError, match="recall has tokens 0 to 4, got 5"):
        task.word(5)
    assert make_task("multi_hop", entities=4, values=32).describe() == (
        "multi_hop: facts lead from entity to entity to a value, which is asked (48 tokens of 41, 32 answers; "
        "chance 0.03125, 3.4657 nats; from the bag of tokens 0.2952, 1.3221)"
    )


def test_every_part_of_a_local_window_is_useless_without_the_rest() -> None:
    task = make_task("local", context=4, window=3, symbols=4, rule=5)
    codes = np.arange(4**3)
    ids = np.stack([codes // 16, codes // 4 % 4, codes % 4, codes * 0], -1)
    answers = task.solve(ids)[:, 3].reshape(4, 4, 4)
    for axis in range(3):
        assert (np.sort(answers, axis) == np.moveaxis(np.arange(4)[:, None, None], 0, axis) + 4).all()
    assert (make_task("local", context=4, window=3, symbols=4, rule=6).solve(ids) != task.solve(ids)).any()


def test_stale_and_featureless_guesses() -> None:
    task: Any = make_task("overwrite", keys=3, writes=3, values=4, context=40)
    ids, labels = task.examples(0, 0, 4000)
    facts, asked = ids[:, : task.plan.facts].reshape(4000, -1, 2), ids[:, task.plan.facts]
    mine = facts[..., 0] == asked[:, None]
    share = ((facts[..., 1] == labels[:, task.plan.facts + 1][:, None]) & mine).sum(1) / 3
    assert share.mean() == pytest.approx(task.stale_chance, abs=5 * share.std() / math.sqrt(4000))
    assert task.stale_chance == pytest.approx(1 / 3 + 2 / 3 / 4)
    task = make_task("cross_depth", features=2, values=8)
    assert task.featureless_chance == 0.5 + 0.5 / 8
