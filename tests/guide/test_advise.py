"""Advice: the ranking follows the evidence and the shape, and what it proposes can be run."""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.commands import call, run
from twoaxis import cli, preset
from twoaxis.guide.advise import Advice, Question, advise, paper_says
from twoaxis.guide.answer import BEGINNINGS, document, sentence, verdict
from twoaxis.guide.candidates import CANDIDATES, Place, for_goal
from twoaxis.guide.evidence import DATA, Evidence, read_evidence
from twoaxis.guide.interview import QUESTIONS, interview
from twoaxis.guide.next_steps import deployment_flags, next_steps
from twoaxis.model.decoder import Decoder
from twoaxis.model.deployment import Deployment
from twoaxis.model.presets import find_shape
from twoaxis.model.save import save_decoder
from twoaxis.model.variant import make_contender, with_method
from twoaxis.pretrained.start import read_method

HERE = Deployment(context=64)
SMALL = ("advise", "--shape", "nano", "--context", "64")


@functools.cache
def asked(**fields: Any) -> Advice:
    return advise(Question(**{"shape": "nano", "deployment": HERE, **fields}))


def order(advice: Advice) -> list[str]:
    return [choice.method for choice in advice.ranked]


def edited(tmp_path: Path, change: Any) -> str:
    """A copy of the evidence file with every record passed through `change`; None drops it."""
    found = json.loads(DATA.read_text(encoding="utf-8"))
    found["records"] = [new for record in found["records"] if (new := change(dict(record))) is not None]
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(found))
    return str(path)


def test_the_ranking_is_trusted_over_time() -> None:
    advice = asked(goal="shortcut")
    assert {c.candidate.goal for c in advice.ranked} == {"shortcut"}
    nets = [c.net for c in advice.ranked]
    assert nets == sorted(nets, reverse=True)
    for choice in advice.ranked:
        assert choice.net == pytest.approx(choice.trust.speed_up / choice.costs.train.fused)
        assert choice.ratio == choice.costs.train.fused


def test_every_candidate_builds_on_every_shape() -> None:
    for name in ("nano", "smollm2-135m", "llama-3-8b", "kimi-k3"):
        shape = find_shape(name)
        for start in ("scratch", "retrofit"):
            for gpu in (True, False):
                for candidate in CANDIDATES:
                    with_method(shape, candidate.contender(Place(shape, start, gpu)))  # options are checked in it
    assert len(for_goal("any")) == len(CANDIDATES)


def test_other_evidence_changes_the_ranking(tmp_path: Path) -> None:
    """A retracted paper takes its method down; a new third-party result takes another to the top."""
    before = asked(goal="shortcut")
    top = before.ranked[0].candidate.name

    def without(record: dict[str, Any]) -> dict[str, Any] | None:
        return None if record["method"].startswith(top) and record["kind"] != "none" else record

    path = edited(tmp_path, without)
    after = advise(before.question, read_evidence(path))
    assert after.ranked[0].candidate.name != top
    lost = next(c for c in after.ranked if c.candidate.name == top)
    assert lost.trust.speed_up == 1.0
    assert "no published result for this form" in lost.risks

    new = {"method": "deep_delta", "form": "d_v=1", "kind": "third party", "source": "a new study", "metric": "loss"}
    more = [*json.loads(DATA.read_text())["records"], {**new, "baseline": 3.0, "value": 2.5, "seeds": 5}]
    Path(path).write_text(json.dumps({"law": read_evidence().law._asdict(), "records": more}))
    assert advise(before.question, read_evidence(path)).ranked[0].method == "deep_delta"


def test_another_shape_changes_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four channels cost a small model, which waits for its kernels, no more than one; a large one they do."""
    forms = tuple(c for c in CANDIDATES if c.name == "deep_delta")
    monkeypatch.setattr("twoaxis.guide.advise.for_goal", lambda goal: forms)
    small = advise(Question(shape="nano", deployment=HERE))
    large = advise(Question(shape="llama-3-8b", deployment=Deployment(context=1024)))
    assert [c.candidate.form for c in small.ranked] == ["d_v=4", "d_v=1"]
    assert [c.candidate.form for c in large.ranked] == ["d_v=1", "d_v=4"]
    (near, plain), (thin, wide) = ([c.ratio for c in found.ranked] for found in (small, large))
    assert wide / thin > 1.03 > near / plain


def test_limits_leave_out_with_their_number() -> None:
    free = asked(goal="mixing")
    slowest = max(free.ranked, key=lambda c: c.ratio)
    limit = 100 * (slowest.ratio - 1) - 1
    strict = asked(goal="mixing", max_overhead=limit)
    assert slowest.method in [c.method for c in strict.left_out]
    assert all(100 * (c.ratio - 1) <= limit for c in strict.ranked)
    assert f"over the {limit:g}% allowed" in (strict.left_out[0].left_out or "")
    tight = asked(goal="mixing", headroom=0.0)
    assert all(c.added <= 0 for c in tight.ranked)
    assert all("GB more on a device" in (c.left_out or "") for c in tight.left_out)
    none = asked(goal="mixing", max_overhead=0.0, headroom=0.0)
    assert not none.ranked
    assert "Stay with the plain residual" in verdict(none)
    assert next_steps(none, 3) == ()


def test_serving_and_kernels_change_the_time() -> None:
    train, serve = asked(goal="mixing"), asked(goal="mixing", serving=1.0)
    written = asked(goal="mixing", kernels="written")
    for choice in serve.ranked:
        assert choice.ratio == choice.costs.decode.fused
    for choice in written.ranked:
        assert choice.ratio == choice.costs.train.naive
    assert order(train) != order(written) or [c.net for c in train.ranked] != [c.net for c in written.ranked]


def test_a_retrofit_starts_equal_and_says_how() -> None:
    advice = asked(start="retrofit")
    starts = {c.candidate.title: c.neutral for c in (*advice.ranked, *advice.left_out)}
    assert starts["deep_delta (d_v=1)"] == "blend"
    assert starts["elc_bert"] == "blend"
    assert starts["hyper_connections"] == "bitwise"
    assert starts["muddformer"] == "bitwise"
    assert starts["short_swa"] == "bitwise"
    assert starts["attention_residuals (block)"] in ("bitwise", "rounding")
    assert set(starts.values()) <= set(BEGINNINGS)
    blended = next(c for c in advice.ranked if c.candidate.title == "deep_delta (d_v=1)")
    assert any("faded in" in risk for risk in blended.risks)
    plain = next(c for c in asked(goal="shortcut").ranked if c.candidate.title == "deep_delta (d_v=1)")
    assert blended.costs.traffic.fused > plain.costs.traffic.fused, "the plain stream is carried beside it"
    dense = next(c for c in advice.ranked if c.candidate.name == "denseformer")
    assert any(r.setting == "retrofit" for r in dense.records)
    assert not any("on a trained model" in risk for risk in dense.risks)


def test_the_paper_is_followed_where_numbers_support_it() -> None:
    said = paper_says(asked(goal="mixing"))
    assert len(said) == 1
    assert "advises short_swa. No number supports that yet" in said[0]
    assert "advises deep_delta. The numbers do not put it first" in paper_says(asked(goal="shortcut"))[0]
    assert paper_says(asked(goal="retrieval")) == []
    evidence = read_evidence()
    others = ("hyper_connections", "manifold_hyper_connections")
    kept = Evidence(evidence.law, tuple(r for r in evidence.records if r.name not in others))
    agreed = advise(Question(shape="nano", goal="shortcut", deployment=HERE), kept)
    best = agreed.ranked[0]
    expected = "The numbers agree." if best.candidate.name == "deep_delta" and best.net > 1 else "do not put it first"
    assert expected in paper_says(agreed)[0]


class Reached(Exception):
    """A command was parsed and checked, and would begin its work with these values."""

    def __init__(self, *values: Any) -> None:
        self.values = values


WORK = {
    "cost": "twoaxis.commands.cost._predict",
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
    assert words[0] == "twoaxis"

    def reach(*args: Any, **options: Any) -> None:
        raise Reached(*args, *options.items())

    with monkeypatch.context() as patch:
        patch.setattr(WORK[words[1]], reach)
        with pytest.raises(Reached) as reached:
            call(cli.main, words)
    return reached.value.values


@pytest.mark.parametrize("start", ["scratch", "retrofit"])
def test_next_commands_parse_and_their_methods_exist(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    advice = asked(start=start)
    steps = next_steps(advice, len(advice.ranked))
    commands = [shlex.split(step.text)[1] for step in steps]
    assert commands[:2] == (["probe", "cost"] if start == "retrofit" else ["cost", "compare"])
    assert commands[-1] == "compare"
    assert ("retrofit" in commands) == (start == "retrofit")
    for step, command in zip(steps[:-1], commands[:-1], strict=True):
        assert parse(monkeypatch, step.text), command
    shape, pairs, deployment, *_ = parse(monkeypatch, steps[commands.index("cost")].text)
    assert (shape, deployment) == ("nano", HERE)
    assert len(pairs) == 1 + len(CANDIDATES)
    for pair in pairs:
        with_method(find_shape("nano"), make_contender(*pair))
    request = parse(monkeypatch, steps[-1].text)[0]
    tiny = find_shape("tiny")
    words = shlex.split(steps[-1].text)
    small = [(flag, text) for flag, text in itertools.pairwise(words) if flag in ("--stream", "--mixer")]
    assert len(small) == len(CANDIDATES)
    for flag, text in small:
        with_method(tiny, make_contender(text) if flag == "--stream" else make_contender(None, text))
    assert request is not None


def test_the_model_of_a_retrofit_is_the_folder_that_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    save_decoder(folder, Decoder(preset("nano")))
    advice = advise(Question(shape=str(folder), start="retrofit", goal="mixing", deployment=HERE))
    probe, _, retrofit, *_ = next_steps(advice, 2)
    source, *options = parse(monkeypatch, probe.text)
    assert source == parse(monkeypatch, retrofit.text)[0] == str(folder)
    given = dict(options)
    assert given["mixers"] == list(choice.method for choice in advice.ranked[:2])
    assert (list(given["streams"]), given["out"]) == ([], "probes/advice")
    for spelled in given["mixers"]:
        assert read_method("standard", spelled).methods.mixer == spelled.partition(":")[0]


def test_deployment_flags_say_what_differs() -> None:
    assert deployment_flags(Deployment()) == []
    found = deployment_flags(Deployment(tensor_parallel=2, sequence_parallel=True, hardware="h200"))
    assert found == ["--hardware", "h200", "--tensor-parallel", "2", "--sequence-parallel"]


def test_a_record_in_words() -> None:
    record = next(r for r in read_evidence().records if r.method == "denseformer" and r.value == 17.84)
    text = sentence(record)
    for words in ("validation perplexity 18.61 to 17.84", "378 M parameters", "3 seeds", "arXiv 2402.02622, table 1"):
        assert words in text


def test_the_page_has_everything() -> None:
    done = run(*SMALL, "--goal", "shortcut", "--pipeline-stages", "2", "--top", "2")
    assert done.code == 0
    shown = " ".join(done.out.split())
    for words in (
        "RANKING",
        "1. ",
        "2. ",
        "What it does",
        "Cost here",
        "Published",
        "Risk",
        "NEXT",
        "pipeline traffic",
    ):
        assert words.lower() in shown.lower(), words
    assert "advise: 4 methods" in done.err
    assert len(document(asked(goal="shortcut"), 1).blocks) > 5


def test_one_document() -> None:
    done = run(*SMALL, "--goal", "mixing", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    names = [row["method"].partition(":")[0] for row in found["ranked"]]
    assert sorted(names) == ["canon", "short_conv", "short_swa", "short_swa"]
    canon = next(row for row in found["ranked"] if row["method"] == "canon")
    assert canon["net"] == pytest.approx(canon["trusted_speed_up"] / canon["time_ratio"])
    assert any(r["value"] == 62.4 and r["gain"] == pytest.approx(1.8) for r in canon["records"])
    assert found["question"]["deployment"]["context"] == 64


def test_records_are_printed() -> None:
    shown = " ".join(run("advise", "--records", "depth_attention", "muddformer").out.split())
    assert "No published result: The paper reports no experiment." in shown
    assert "10.83" in shown
    document = json.loads(run("advise", "--records", "--json").out)
    assert len(document["records"]) == len(read_evidence().records)
    wrong = run("advise", "--records", "nothing")
    assert wrong.code == 2
    assert "there is no record of 'nothing'" in wrong.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--serving", "2"), "serving must lie between 0 and 1, got 2"),
        (("--max-overhead", "-1"), "max_overhead must not be negative, got -1"),
        (("--headroom", "-1"), "headroom must not be negative, got -1 GB"),
        (("--top", "0"), "--top must be at least 1, got 0"),
        (("--evidence", "nowhere.json"), "there is no evidence file nowhere.json"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    done = run(*SMALL, *words)
    assert done.code == 2
    assert f"twoaxis: {message}" in done.err


def test_the_interview() -> None:
    lines = io.StringIO("llama-3-9000b\nnano\nmix\nretro\n\n2.5\n2\n128\n\n150\n30%\n10\n\n")
    out = io.StringIO()
    answers = interview(lines=lines, out=out)
    assert answers == {
        "shape": "nano",
        "goal": "mixing",
        "start": "retrofit",
        "hardware": "h100",
        "pipeline_stages": 2,
        "context": 128,
        "micro_batch": 1,
        "serving": 0.3,
        "max_overhead": 10,
        "headroom": None,
    }
    shown = out.getvalue()
    for words in ("unknown shape 'llama-3-9000b'", "answer with a whole number, not '2.5'", "at most 100"):
        assert words in shown
    assert shown.count("Model: ") == 2


def test_an_interview_that_ends_takes_the_defaults() -> None:
    answers = interview(lines=io.StringIO("nano\n"), out=io.StringIO())
    assert answers["shape"] == "nano"
    assert {q.option: answers[q.option] for q in QUESTIONS[1:]} == {q.option: q.default for q in QUESTIONS[1:]}


def test_without_a_terminal_it_does_not_wait(tmp_path: Path) -> None:
    """Standard input stays open and silent; the command must not read it, and help must not load torch."""
    script = (
        "import sys\nfrom twoaxis import cli\nfrom twoaxis.commands import advise\n"
        "from twoaxis.show.document import Document, Shown\n"
        "advise._advise = lambda given, *rest: print(given['goal'], given['shape']) or Shown({}, Document('', ()))\n"
        "sys.argv = ['twoaxis', 'advise']\ntry:\n    cli.main()\nexcept SystemExit as stop:\n    code = stop.code\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    with processes.start(program=("-c", script), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.wait(timeout=60) == 0
        assert process.stdout.read().strip() == "any llama-3-8b"


def test_a_closed_input_is_not_read() -> None:
    """As `<&-` leaves it: there is no standard input at all."""
    asks = "from twoaxis.commands import advise; print(advise._terminal())"
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" <&-', sys.executable, asks], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_help() -> None:
    done = run("advise", "--help")
    assert done.code == 0
    for words in ("--max-overhead", "--evidence", "Rank what to try first"):
        assert words in done.out


def test_on_a_terminal_it_asks() -> None:
    """A real one: the questions are shown, the answers used, and the end of the input takes the defaults."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = processes.start("advise", stdin=theirs, stderr=theirs)
    os.write(ours, b"nano\nmixing\n\n\n\n64\n\x04")
    out, _ = process.communicate(timeout=300)
    shown = os.read(ours, 65_536).decode(errors="replace")  # a read may end inside a character
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, shown
    assert "Goal: a better shortcut" in shown
    assert "Advice for nano" in out
    assert "Wanted: local mixing, from scratch" in out
    assert "context 64" in " ".join(out.split())
