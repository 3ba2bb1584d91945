"""The tasks once more in plain Python, from what their pages say and nothing else: slow, one question at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Words = list[str]


def recall(words: Words, task: Any) -> dict[int, str]:
    length, pairs = task.key_length, task.pairs
    facts = {}
    for _ in range(pairs):
        facts[tuple(words[:length])] = words[length]
        words = words[length + 1 :]
    start = pairs * (length + 1)
    asked = [tuple(words[i : i + length]) for i in range(0, len(words) - length, length)]
    return {start + (i + 1) * length: facts[key] for i, key in enumerate(asked) if "." not in key}


def induction(words: Words, task: Any) -> dict[int, str]:
    n, length, answers = task.order, task.length, {}
    text = " " + " ".join(words[:length]) + " "
    for t in range(length + n, len(words), n):
        asked = " ".join(words[t - n : t])
        after = [text[i:].split()[n:] for i in range(len(text)) if text[i:].startswith(f" {asked} ")]
        if len(after) == 1 and after[0]:
            answers[t] = after[0][0]
    return answers


def overwrite(words: Words, task: Any) -> dict[int, str]:
    start, held = 2 * task.keys * task.writes, {}
    for i in range(0, start, 2):
        held[words[i]] = words[i + 1]
    return {t + 1: held[words[t]] for t in range(start, len(words) - 1)}


def multi_hop(words: Words, task: Any) -> dict[int, str]:
    start, leads = 2 * task.hops * task.entities, {}
    for i in range(0, start, 2):
        leads[words[i]] = words[i + 1]
    answers = {}
    for t in range(start, len(words) - 1):
        now = words[t]
        while now in leads:
            now = leads[now]
        answers[t + 1] = now
    return answers


def cross_depth(words: Words, task: Any) -> dict[int, str]:
    c, leads, records = task, {}, {}
    start = 2 * c.hops * c.entities
    for i in range(0, start, 2):
        leads[words[i]] = words[i + 1]
    for _ in range(c.entities):
        records[words[start]] = words[start + 1 : start + 1 + c.features]
        start += 1 + c.features
    answers = {}
    for t in range(start, len(words) - 1):
        entity, feature = words[t].removeprefix("q(").removesuffix(")").split(",")
        while entity in leads:
            entity = leads[entity]
        answers[t + 1] = records[entity][int(feature.removeprefix("f"))]
    return answers


def local(words: Words, task: Any) -> dict[int, str]:
    """Only what a Latin hypercube promises can be told without the table; see test_local."""
    *inside, outside = task.tables().tolist()
    number = [int(word.removeprefix("a")) for word in words]
    answers = {}
    for t in range(len(inside), len(words)):
        total = sum(table[number[t - lag]] for lag, table in enumerate(inside, start=1))
        answers[t] = f"v{outside[total % task.symbols]}"
    return answers


ORACLES: dict[str, Callable[[Words, Any], dict[int, str]]] = {
    "recall": recall,
    "induction": induction,
    "multi_hop": multi_hop,
    "cross_depth": cross_depth,
    "overwrite": overwrite,
    "local": local,
}
