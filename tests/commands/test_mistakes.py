"""Mistakes on the command line: one line that names field and value, exit code 2, and nothing left behind.

The table holds everything that was ever found to end otherwise. Random option strings are tried besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tests.support.commands import run
from twoaxis.base.options import field_types
from twoaxis.base.spec import spell_value
from twoaxis.depth.registry import STREAMS
from twoaxis.model.presets import preset
from twoaxis.model.variant import make_contender
from twoaxis.sequence.registry import MIXERS
from twoaxis.training.config import TrainConfig, merge, parse_model, read_fields
from twoaxis.training.setup import resolve

DIGITS = "9" * 400
MISTAKES = [
    (("--stream", "deep_delta", "--stream", "denseformer"), "--stream is given 2 times; give it once"),
    (("--save-model", "--lr", "1", "--no-save-model"), "--save-model is given 2 times; give it once"),
    (("--stream", "deep_delta:blocks=3"), "deep_delta has no option 'blocks'"),
    (("--stream", "deep_delta:width=3"), "deep_delta has no option 'width'"),
    (("--stream", "deep_delta:kinds=3"), "deep_delta has no option 'kinds'"),
    (("--stream", "deep_delta:name=3"), "deep_delta has no option 'name'"),
    (("--mixer", "short_swa:name=3"), "short_swa has no option 'name'"),
    (("--stream", "deep_delta:placement=0-9999999999"), "block 9999999999 is beyond the 10,000"),
    (("--stream", f"deep_delta:value_channels={DIGITS}"), "value_channels must be at most"),
    (("--stream", "deep_delta:value_channels=99999999999999999999"), "value_channels must be at most"),
    (("--stream", f"deep_delta:gate_start={DIGITS}"), "gate_start must be"),
    (("--stream", "deep_delta:value_channels=" + "[" * 100_000), "value_channels must be an integer"),
    (("--stream", "hyper_connections:streams=100000000"), "streams must be at most 256, got 100000000"),
    (("--model", "num_hidden_layers=100000000"), "num_hidden_layers must be at most 10000, got 100000000"),
    (("--model", "vocab_size=99999999999999"), "vocab_size must be at most 134217728, got 99999999999999"),
    (("--model", "hidden_size=99999999999999"), "hidden_size must be at most"),
    (("--model", f"hidden_size={DIGITS}"), "hidden_size must be at most"),
    (("--threads", "1000000"), "threads must be at most 1024, got 1000000"),
    (("--device", "gpu"), "device 'gpu' cannot be used"),
    (("--steps", DIGITS), "expected an integer such as 500, 300k or 2M"),
    (("--steps", "-1"), "steps must not be negative, got -1"),
    (("--seed", "-1"), "seed must not be negative, got -1"),
    (("--stream", "deep_delta:train.lr=1"), "give --lr 1"),
    (("--mixer", "canon:train.eval_every=5"), "give --eval-every 5"),
    (("--stream", "standard:train.isolate=true"), "give --isolate"),
    (("--stream", "standard:train.save_model=false"), "give --no-save-model"),
    (("--stream", "deep_delta:label=x"), "has a label, which names a row of a comparison: leave it out"),
    (("--stream", "deep_delta:vlaue_channels=2"), "did you mean 'value_channels'"),
    (("--model", "hidden_size"), "--model hidden_size changes nothing"),
    (("--model", "hiden_size=32"), "no option 'hiden_size' (did you mean 'hidden_size'?)"),
    (("--model", "vocab_size=5"), "the data has 49 tokens, model.vocab_size is 5"),
    (("--tokens", "5"), "steps (1) and tokens (5) are both given; give one of them"),
    (("--stepps", "3"), "--steps"),
    (("--report-to", "tensorbord"), "unknown report_to 'tensorbord' (did you mean 'tensorboard'?)"),
    (("--config", "none.toml"), "none.toml cannot be read"),
    (("--from", "nowhere"), "there is no folder or file nowhere"),
    (("--train", "new"), "train=new chooses from a saved model"),
    (("--use", "none.py"), "there is no file none.py to take methods from"),
    (("--stream", "nonsense"), "unknown stream 'nonsense'"),
    (("--stream", "attnrez"), "unknown stream 'attnrez' (did you mean 'attnres'?)"),
    (("--mixer", "conf"), "unknown mixer 'conf' (did you mean 'conv'?)"),
    (("--stream", ""), "names no method"),
    (("--preset", "nanoo"), "did you mean 'nano'"),
    (("--batch", "100000000000"), "batch must be at most 1048576, got 100000000000"),
    (("--context", "999999999999"), "context must be at most 16777216, got 999999999999"),
    (("--eval-examples", "100000000000000"), "eval_examples must be at most 16777216, got 100000000000000"),
    (("--tokenizer", ""), "tokenizer is empty"),
    (("--tokenizer", "bpe:0"), "tokenizer 'bpe:0' is too small"),
    (("--tokenizer", f"bpe:{DIGITS}"), "is too large: a model has at most 134217728 tokens"),
    (("--data", ""), "data names nothing"),
    (("--data", "task:recall:name=3"), "recall has no option 'name'"),
    (("--data", "task:recall:summary=3"), "its options are context, pairs, values, keys, key_length"),
    (("--data", "task:recall:key_length=100000"), "key_length must be at most 12, got 100000"),
    (("--data", "task:local:symbols=10000000000"), "symbols must be at most 1048576, got 10000000000"),
    (("--out", ""), "it names no folder"),
    (("--stream", "gated_streams:rank=1099511627776"), "rank must be at most 65536, got 1099511627776"),
    (("--mixer", "dynamic_conv:rank=1099511627776"), "rank must be at most 65536, got 1099511627776"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda v: str(v)[:60])
def test_a_mistake_is_one_line_and_leaves_nothing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    usual = {"--out": str(place), "--data": "task:recall", "--steps": "1"}
    rest = [part for option, value in usual.items() if option not in arguments for part in (option, value)]
    done = run("train", *rest, *arguments)
    assert done.code == 2, done.err
    assert message in " ".join(done.err.replace("│", " ").split())
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not place.exists()


def test_a_probe_of_nothing_leaves_nothing(tmp_path: Path) -> None:
    done = run("probe", "nowhere", "--out", str(tmp_path / "probe"))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("twoaxis: there is no folder or file nowhere")
    assert not (tmp_path / "probe").exists()


NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**63, 10**30, -1, 0.5]))
VALUES = st.one_of(
    NUMBERS,
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.lists(NUMBERS, max_size=3),
    st.sampled_from(["all", "1-"]),
)


@st.composite
def spellings(draw: st.DrawFn, streams: bool) -> str:
    """A method with some of its options, or with options it does not have, and any values."""
    registry = STREAMS if streams else MIXERS
    name = draw(st.sampled_from(registry.names()))
    known = [*registry.find(name).Config.__dataclass_fields__, "placement", "blend", "init", "model.hidden_size", "x"]  # type: ignore[attr-defined]
    options = draw(st.dictionaries(st.sampled_from(known), VALUES, max_size=3))
    return name + (":" if options else "") + ",".join(f"{key}={spell_value(value)}" for key, value in options.items())


@given(stream=st.one_of(st.none(), spellings(True)), mixer=st.one_of(st.none(), spellings(False)))
@settings(max_examples=25)
def test_random_options_are_a_model_or_a_refusal(stream: str | None, mixer: str | None) -> None:
    """No other exception than a ValueError of one line, and no hang, whatever is written."""
    refusal = "refused"
    try:
        contender = make_contender(stream, mixer)
        if not contender.train:
            preset("nano", **contender.model_fields(), vocab_size=64)
    except ValueError as error:
        refusal = str(error)
    assert refusal
    assert "\n" not in refusal


FIELDS = st.dictionaries(st.sampled_from([*field_types(TrainConfig), "contxt", "from"]), VALUES, max_size=4)


@given(file=FIELDS, said=FIELDS)
@example(file={"model": 3}, said={})
@example(file={"model": None}, said={"model": ""})
@example(file={}, said={"model": [1]})
@settings(max_examples=60)
def test_random_fields_are_a_run_or_a_refusal(file: dict[str, Any], said: dict[str, Any]) -> None:
    """In a file and on the command line: no other exception, and nothing that is said is passed over in silence."""
    run, refusal = None, ""
    try:
        run = resolve(merge(file, said))
    except ValueError as error:
        refusal = str(error)
    assert "\n" not in refusal
    for name, value in said.items() if run is not None else ():
        kept = getattr(run, name)
        if name == "model":
            tables = [file.get("model", {}), value]
            filed, asked = (table if isinstance(table, dict) else parse_model(table) for table in tables)
            assert kept == {**filed, **asked}
        else:
            assert kept in (value, (value,)) or list(kept) == list(value)


@given(data=st.binary(max_size=60), ending=st.sampled_from([".toml", ".json", ".yaml"]))
def test_random_bytes_are_fields_or_a_refusal(
    data: bytes, ending: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"random{ending}"
    path.write_bytes(data)
    read = refusal = None
    try:
        read = read_fields(path)
    except ValueError as error:
        refusal = str(error)
    assert isinstance(read, dict) or (refusal and str(path) in refusal and "\n" not in refusal)
