"""Advice: the ranking follows the evidence and the shape, and what it proposes can be run."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support import processes
from tests.support.commands import call, run
from twoaxis import cli
from twoaxis.base.method import Card, Suggestion
from twoaxis.base.timer import Rounds, Throughput
from twoaxis.costs.costs import CostModel, Costs
from twoaxis.depth.registry import METHODS, STREAMS
from twoaxis.guide import next_steps as steps_of
from twoaxis.guide.advise import Advice, Question, advise, papers_say
from twoaxis.guide.answer import BEGINNINGS, verdict
from twoaxis.guide.evidence import DATA, Evidence, read_evidence
from twoaxis.guide.next_steps import deployment_flags, next_steps
from twoaxis.guide.suggest import Place, candidates
from twoaxis.model.deployment import Deployment
from twoaxis.model.presets import find_shape
from twoaxis.model.variant import Contender, make_contender, with_method
from twoaxis.sequence.registry import MIXERS

HERE = Deployment(context=64)
SMALL = ("advise", "--shape", "nano", "--context", "64")


class Shared(CostModel):
    """A method in a deployment is traced once, however many questions are asked about it."""

    made: ClassVar[dict[str, Costs]] = {}

    @property
    def plain(self) -> Costs:  # type: ignore[override]
        return self._make(make_contender(), None)

    def _make(self, contender: Contender, plain: Costs | None) -> Costs:
        key = f"{self.shape} {self.deployment} {contender.key}"
        return self.made.get(key) or self.made.setdefault(key, super()._make(contender, plain))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast times a training step; one test does so."""
    monkeypatch.setattr(steps_of, "comparison_seconds", lambda methods: 100.0 * (1 + methods))
    monkeypatch.setattr("twoaxis.guide.advise.CostModel", Shared)


@functools.cache
def asked(**fields: Any) -> Advice:
    return advise(Question(**{"shape": "nano", "deployment": HERE, **fields}))


def test_methods_suggest_what_can_be_built() -> None:
    """Every method but the baseline, on every shape, from scratch and retrofitted, with records of the form."""
    for name in ("nano", "kimi-k3"):
        shape = find_shape(name)
        for start, gpu in itertools.product(("scratch", "retrofit"), (True, False)):
            for candidate in candidates():
                with_method(shape, candidate.spelled(Place(shape, start, gpu)).contender)  # options are checked in it
    assert {c.name for c in candidates()} == {*STREAMS.names(), *MIXERS.names()} - {"standard"}
    for candidate in candidates():
        assert read_evidence().of(candidate.name, candidate.form), candidate.title
        assert candidate.why != "-", candidate.title
        assert candidate.card.goal != "-", candidate.title


def test_ones_own_method_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"card": Card.blank("Mine"), "suggestions": (Suggestion("a", "why"),)}
    monkeypatch.setitem(METHODS, "mine", type("Mine", (STREAMS.find("denseformer"),), made))
    assert [c.title for c in candidates() if c.name == "mine"] == ["mine (a)"]
    assert "mine" not in [c.name for c in candidates("retrieval")]


def test_the_ranking_is_trusted_over_time() -> None:
    ours, ideal = asked(goal="shortcut"), asked(goal="shortcut", kernels="ideal")
    for advice, way in ((ours, "eager"), (ideal, "fused")):
        assert {c.candidate.card.goal for c in advice.ranked} == {"shortcut"}
        nets = [c.net for c in advice.ranked]
        assert nets == sorted(nets, reverse=True)
        for choice in advice.ranked:
            assert choice.ratio == getattr(choice.costs.train, way)
            assert choice.ideal == choice.costs.train.fused
            assert choice.net == pytest.approx(choice.trust.speed_up / choice.ratio)


def test_nothing_is_traced_that_is_not_asked_for() -> None:
    costs = next(c.costs for c in asked(goal="shortcut").ranked if c.candidate.name == "hyper_connections")
    assert "trained" in vars(costs)
    assert not {"prefilled", "decoded", "remade"} & set(vars(costs))


def test_other_evidence_changes_the_ranking(tmp_path: Path) -> None:
    """A retracted paper takes its method down; a new result of our own takes another to the top, and is marked."""
    before = asked(goal="shortcut")
    top = before.ranked[0].candidate.name
    found = json.loads(DATA.read_text(encoding="utf-8"))
    kept = [r for r in found["records"] if not r["method"].startswith(top) or r["kind"] == "none"]
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps({"law": found["law"], "records": kept}))
    after = advise(before.question, read_evidence(path))
    lost = next(c for c in after.ranked if c.candidate.name == top)
    assert lost.trust.speed_up == 1.0
    assert "no published result for this form" in lost.risks
    new = {"method": "deep_delta", "form": "d_v=1", "kind": "this library", "source": "a run of ours", "metric": "loss"}
    more = [*kept, {**new, "baseline": 3.0, "value": 2.2, "seeds": 5}]
    path.write_text(json.dumps({"law": found["law"], "records": more}))
    done = run(*SMALL, "--goal", "shortcut", "--evidence", str(path), "--kernels", "ideal")
    shown = " ".join(done.out.split())
    assert "Try deep_delta first" in shown
    assert "measured with this library, a run of ours" in shown


def test_limits_exclude_with_their_number() -> None:
    free = asked(goal="mixing")
    slowest = max(free.ranked, key=lambda c: c.ratio)
    limit = 100 * (slowest.ratio - 1) - 1
    strict = asked(goal="mixing", max_overhead=limit)
    assert slowest.method in [c.method for c in strict.excluded]
    assert all(100 * (c.ratio - 1) <= limit for c in strict.ranked)
    assert f"over the {limit:g}% allowed" in (strict.excluded[0].excluded or "")
    tight = asked(goal="mixing", headroom=0.0)
    assert all(c.added <= 0 for c in tight.ranked)
    assert all("GB more on a device" in (c.excluded or "") for c in tight.excluded)
    none = asked(goal="mixing", max_overhead=0.0, headroom=0.0)
    assert not none.ranked
    assert "Stay with the plain residual" in verdict(none)
    assert next_steps(none) == ()
    for choice in asked(goal="mixing", serving=1.0).ranked:
        assert choice.ratio == choice.costs.decode.eager


def test_a_retrofit_starts_equal_and_says_how() -> None:
    advice = asked(start="retrofit")
    starts = {c.candidate.title: c.neutral for c in (*advice.ranked, *advice.excluded)}
    assert starts["deep_delta (d_v=1)"] == starts["elc_bert"] == "blend"
    assert starts["hyper_connections"] == starts["muddformer"] == starts["short_swa"] == "bitwise"
    assert starts["attention_residuals (block)"] in ("bitwise", "rounding")
    assert set(starts.values()) <= set(BEGINNINGS)
    blended = next(c for c in advice.ranked if c.candidate.title == "deep_delta (d_v=1)")
    assert any("faded in" in risk for risk in blended.risks)
    plain = next(c for c in asked(goal="shortcut").ranked if c.candidate.title == "deep_delta (d_v=1)")
    assert blended.costs.prefilled.fused > plain.costs.prefilled.fused, "the plain stream is carried beside it"
    dense = next(c for c in advice.ranked if c.candidate.name == "denseformer")
    assert not any("on a trained model" in risk for risk in dense.risks)


def test_papers_are_followed_where_numbers_support_them() -> None:
    said = papers_say(asked(goal="mixing"))
    assert len(said) == 1
    assert "advises short_swa. No number supports that yet" in said[0]
    assert "advises deep_delta. The numbers do not put it first" in papers_say(asked(goal="shortcut"))[0]
    assert papers_say(asked(goal="retrieval")) == []
    evidence = read_evidence()
    record = next(r for r in evidence.records if r.name == "deep_delta" and (r.gain or 0) > 0)
    alone = Evidence(evidence.law, (record,), (), evidence.advice)
    agreed = advise(Question(shape="nano", goal="shortcut", deployment=HERE, kernels="ideal"), alone)
    best = agreed.ranked[0]
    expected = "The numbers agree." if best.candidate.name == "deep_delta" and best.net > 1 else "do not put it first"
    assert expected in papers_say(agreed)[0]


class Reached(Exception):
    """A command was parsed and checked, and would begin its work with these values."""

    def __init__(self, *values: Any) -> None:
        self.values = values


WORK = {
    "cost": "twoaxis.costs.costs.CostModel",
    "compare": "twoaxis.comparison.run.compare",
    "retrofit": "twoaxis.pretrained.retrofit.retrofit",
    "probe": "twoaxis.comparison.probe.probe",
    "train": "twoaxis.training.train.train",
    "inspect": "twoaxis.model.load.check_folder",
}
"""What each command calls once its options are read."""


def parse(monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[Any, ...]:
    """Run a command line up to its work, and return what the work was given."""
    words = shlex.split(text)

    def reach(*args: Any, **options: Any) -> None:
        raise Reached(*args, *options.items())

    with monkeypatch.context() as patch:
        patch.setattr(WORK[words[1]], reach)
        with pytest.raises(Reached) as reached:
            call(cli.main, words)
    return reached.value.values


@pytest.mark.parametrize("start", ["scratch", "retrofit"])
def test_next_commands_parse_and_their_methods_exist(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    found = asked(start=start)
    advice = Advice(found.question, found.evidence, found.plain, found.ranked, found.excluded, len(found.ranked))
    steps = next_steps(advice)
    commands = [shlex.split(step.text)[1] for step in steps]
    assert commands[:2] == (["probe", "cost"] if start == "retrofit" else ["cost", "compare"])
    assert commands[-1] == "compare"
    assert ("retrofit" in commands) == (start == "retrofit")
    for step, command in zip(steps, commands, strict=True):
        assert parse(monkeypatch, step.text), command
    costs = steps[commands.index("cost")].text
    assert parse(monkeypatch, costs) == ("nano", HERE)
    for words in map(shlex.split, (costs, steps[-1].text)):
        said = [(flag, text) for flag, text in itertools.pairwise(words) if flag in ("--stream", "--mixer")]
        assert len(said) == len(candidates())
        for flag, text in said:
            with_method(find_shape("nano"), make_contender(**{flag[2:]: text}))


def test_the_forecast_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many runs as compare makes, each as long as its budget takes at the speed of a step."""
    monkeypatch.undo()
    fast = Throughput(Rounds((1e4,)), None)
    monkeypatch.setattr("twoaxis.comparison.budget.measure_speeds", lambda *args, **options: {"plain": fast})
    monkeypatch.setattr("twoaxis.comparison.runner.launchers.default_jobs", lambda device: (1, [None]))
    steps_of.comparison_seconds.cache_clear()
    taken = steps_of.comparison_seconds(3)
    steps_of.comparison_seconds.cache_clear()
    assert 12 * 512_000 / 1e4 < taken < 1.2 * 12 * 512_000 / 1e4  # four contenders, three seeds, 500 steps


def test_deployment_flags_say_what_differs() -> None:
    assert deployment_flags(Deployment()) == []
    given = Deployment(tensor_parallel=2, sequence_parallel=True, hardware="h200")
    assert deployment_flags(given) == ["--hardware", "h200", "--tensor-parallel", "2", "--sequence-parallel"]


def test_the_page_and_the_document() -> None:
    done = run(*SMALL, "--goal", "shortcut", "--pipeline-stages", "2", "--top", "2")
    shown = " ".join(done.out.split()).lower()
    for words in (
        "ranking",
        "1. ",
        "2. ",
        "what it does",
        "calls a sub-layer",
        "published",
        "risk",
        "pipeline traffic",
    ):
        assert words in shown, words
    assert "about 5 min on this machine" in shown
    assert f"advise: {len(candidates('shortcut'))} methods" in done.err
    found = json.loads(run(*SMALL, "--goal", "mixing", "--json").out)
    names = sorted(row["method"].partition(":")[0] for row in found["ranked"])
    assert names == sorted(candidate.name for candidate in candidates("mixing"))
    canon = next(row for row in found["ranked"] if row["method"] == "canon")
    assert canon["net"] == pytest.approx(canon["trusted_speed_up"] / canon["time_ratio"])
    assert any(r["value"] == 62.4 and r["gain"] == pytest.approx(1.8) for r in canon["records"])
    assert found["question"]["deployment"]["context"] == 64
    assert found["next"][-1]["seconds"] == 400


def test_records_are_printed() -> None:
    shown = " ".join(run("advise", "--records", "depth_attention", "mudd").out.split())
    assert "No published result: The paper reports no experiment." in shown
    assert "10.83" in shown
    document = json.loads(run("advise", "--records", "--json").out)
    assert len(document["records"]) == len(read_evidence().records)


def test_without_a_terminal_it_does_not_wait() -> None:
    """Standard input stays open and silent; the command must not read it, and help must not load torch."""
    script = (
        "import contextlib, sys\nfrom twoaxis import cli\n"
        "with contextlib.suppress(SystemExit):\n    cli.run(['advise', '--help'])\n"
        "assert 'torch' not in sys.modules\n"
        "from twoaxis.guide import advise, ask\nfrom twoaxis.show.document import Document, Shown\n"
        "advise.advise = lambda asked, *_, **__: print(asked.deployment.context) or Shown({}, Document('', ()))\n"
        "ask.ask = None\n"
        "sys.exit(cli.run(['advise']) or cli.run(['advise', '--context', '512']))"
    )
    with processes.start(program=("-c", script), stdin=subprocess.PIPE) as process:
        assert process.wait(timeout=60) == 0
        assert process.stdout.read().split()[-2:] == ["4096", "512"]


def test_on_a_terminal_it_asks() -> None:
    """A real one: questions are shown, a wrong answer asked for again, and the end of the input takes the defaults."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    script = (
        "from twoaxis import cli; from twoaxis.guide import next_steps as n; n.comparison_seconds = float; cli.main()"
    )
    process = processes.start("advise", program=("-c", script), stdin=theirs, stderr=theirs)
    os.write(ours, b"llama-3-9000b\nnano\nmixing\n\n\n0\n2\n64\n\x04")
    out, _ = process.communicate(timeout=300)
    shown = os.read(ours, 65_536).decode(errors="replace")  # a read may end inside a character
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, shown
    for words in ("unknown shape 'llama-3-9000b'", "Goal: a better shortcut", "pipeline_stages must be at least 1"):
        assert words in " ".join(shown.split()), words
    told = " ".join(out.split())
    for words in ("Advice for nano", "Wanted: local mixing, from scratch", "context 64", "pipeline parallel 2"):
        assert words in told, words
