"""Mistakes on the command line: one line that says what is wrong and what to do, exit code 2, and nothing left behind.

The table holds what somebody new is likely to do wrong and everything that was ever found to end otherwise; what a
message says of many values is tested where it is raised. Random options, fields and files are tried besides.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.commands import run, run_child
from twoaxis.base.options import field_types
from twoaxis.base.registry import spell_value
from twoaxis.costs.hardware import DATA
from twoaxis.depth.registry import STREAMS
from twoaxis.model.decoder import Decoder
from twoaxis.model.presets import preset
from twoaxis.model.save import save_decoder
from twoaxis.model.variant import make_contender
from twoaxis.sequence.registry import MIXERS
from twoaxis.training.config import TrainConfig, merge, parse_model, read_fields
from twoaxis.training.setup import resolve

DIGITS = "9" * 400
USUAL = {"--out": "out", "--data": "task:recall", "--steps": "1"}
"""Options of `train` where a mistake says nothing else."""


def profile(**changes: Any) -> str:
    """A hardware file with some fields changed."""
    return json.dumps({**json.loads(DATA.read_text())["profiles"]["h100"], **changes})


def family(**fields: Any) -> str:
    """A configuration file of a Llama."""
    return json.dumps({"model_type": "llama", **fields})


MISTAKES: list[tuple[str, str] | tuple[str, str, str]] = [
    # names, paths and words
    ("compair --out out", "unknown command 'compair' (did you mean 'compare'?)"),
    ("generate hf --promt x", "--prompt"),
    ("train --stepps 3", "--steps"),
    ("data notes.txt", "'notes.txt' stands alone; options are --NAME VALUE"),
    ("advise --goal speed", "Expected one of any, mixing, retrieval, shortcut."),
    ("cost --shape nano --shape=tiny", "--shape is given 2 times; give it once"),
    ("train --stream mhc --stream ddl", "twoaxis compare takes several"),
    ("train --save-model --lr 1 --no-save-model", "--save-model is given 2 times; give it once"),
    ("verify --only dualty", "did you mean 'duality'?); the families are contract"),
    ("check none.py", "there is no file none.py"),
    ("train --use none.py", "there is no file none.py to take methods from"),
    ("methods short_sw", "unknown method 'short_sw' (did you mean 'short_swa'?)"),
    ("methods --columns windw", "unknown column 'windw' (did you mean 'window'?)"),
    ("methods --json --columns year", "--columns belongs to the map"),
    ("methods --json --markdown", "two forms of one result"),
    ("methods --width 100 --heads 3", "num_attention_heads (3) must divide hidden_size (100)"),
    ("methods --blocks 0", "num_hidden_layers must be at least 1, got 0"),
    ("train --config none.toml", "none.toml cannot be read"),
    ("train --from nowhere", "there is no folder or file nowhere"),
    ("train --data none.txt", "none.txt"),
    ("train --out ''", "it names no folder"),
    ("train --data ''", "data names nothing"),
    ("train --data ~nobodyatall/text", "there is no file or folder ~nobodyatall/text"),
    ("train --from ~nobodyatall/model", "there is no folder or file ~nobodyatall/model"),
    ("cost --shape ~nobodyatall/model", "there is no configuration file ~nobodyatall/model"),
    ("train --data /dev/zero", "/dev/zero is no regular file, and data is read several times"),
    ("train --data . --tokenizer bytes", "the run out lies in ., whose files are the data: choose another folder"),
    ("compare --data . --tokenizer bytes --out out --stream ddl", "the comparison out lies in ., whose files are the"),
    ("compare --out out --stream ddl --task recall --launcher slurm", "cannot tell how many runs at once"),
    ("data --data text --cache text/cache", "the cache text/cache lies in text, whose files are the data"),
    ("train --device meta", "device 'meta' cannot be used"),
    ("train --use exits.py", "exits.py cannot be imported: SystemExit: 0"),
    ("probe nowhere --out out", "there is no folder or file nowhere"),
    ("compare --out out --file none.toml --stream deep_delta --task recall", "none.toml cannot be read"),
    ("probe saved --out out", "saved is a model of twoaxis, which twoaxis train --from goes on with"),
    ("train --stream short_conv", "'short_conv' is a mixer, not a stream: give it as --mixer"),
    ("train --mixer mhc", "'mhc' is a stream, not a mixer: give it as --stream"),
    ("train --from compared", "compared is a comparison; name the model of one of its runs, such as"),
    ("eval saved --bytes --data task:recall", "task:recall has no text"),
    ("train --out saved", "saved holds a model; choose another folder for --out"),
    ("train --out compared", "compared holds a comparison; choose another folder for --out"),
    ("compare --out unfinished --stream ddl --task recall", "holds a training run; choose another folder for --out"),
    ("compare --out out --stream ddl --task recall --device gpu", "give cpu, cuda or cuda:N"),
    ("compare --out out --stream mhcc --data none.txt", "did you mean 'mhc'?"),
    ("compare --out out --stream mhcc --task recall --dry-run", "did you mean 'mhc'?"),
    ("compare --out out --stream ddl --task recall --model hiden_size=8", "(did you mean 'hidden_size'?)"),
    ("report nowhere", "is not a folder; give the --out of twoaxis compare"),
    ("report ours", "give the --out of twoaxis compare"),
    ("data --examples -1", "examples must lie between 0 and 1000, got -1"),
    ("data --data stdlb", "there is no file or folder stdlb (did you mean 'stdlib'?)"),
    ("data --context 1", "context must be at least 2"),
    # methods and their options
    ("train --stream nonsense", "unknown stream 'nonsense'"),
    ("train --stream attnrez", "unknown stream 'attnrez' (did you mean 'attnres'?)"),
    ("train --mixer conf", "unknown mixer 'conf' (did you mean 'conv'?)"),
    ("train --stream ''", "names no method"),
    ("cost --stream mhc:stream=4", "has no option 'stream' (did you mean 'streams'?)"),
    ("train --stream deep_delta:vlaue_channels=2", "did you mean 'value_channels'"),
    ("train --stream deep_delta:blocks=3", "deep_delta has no option 'blocks'"),
    ("train --stream deep_delta:width=3", "deep_delta has no option 'width'"),
    ("train --stream deep_delta:kinds=3", "deep_delta has no option 'kinds'"),
    ("train --stream deep_delta:name=3", "deep_delta has no option 'name'"),
    ("train --mixer short_swa:name=3", "short_swa has no option 'name'"),
    ("train --stream deep_delta:label=x", "has a label, which names a row of a comparison: leave it out"),
    ("train --stream deep_delta:train.lr=1", "give --lr 1"),
    ("train --mixer canon:train.eval_every=5", "give --eval-every 5"),
    ("train --stream standard:train.isolate=true", "give --isolate"),
    ("train --stream standard:train.save_model=false", "give --no-save-model"),
    ("cost --shape nano --stream standard:train.lr=1", "standard:train.lr=1: train.lr changes the training"),
    ("cost --shape nano --stream standard:model.hiden_size=1", "a decoder has no field 'hiden_size' (did you mean"),
    # sizes without measure
    ("train --stream deep_delta:placement=0-9999999999", "block 9999999999 is beyond the 10,000"),
    (f"train --stream deep_delta:value_channels={DIGITS}", "value_channels must be at most"),
    ("train --stream deep_delta:value_channels=99999999999999999999", "value_channels must be at most"),
    (f"train --stream deep_delta:gate_start={DIGITS}", "gate_start must be"),
    ("train --stream deep_delta:value_channels=" + "[" * 100_000, "value_channels must be an integer"),
    ("train --stream hyper_connections:streams=100000000", "streams must be at most 256, got 100000000"),
    ("train --stream gated_streams:rank=1099511627776", "rank must be at most 65536, got 1099511627776"),
    ("train --mixer dynamic_conv:rank=1099511627776", "rank must be at most 65536, got 1099511627776"),
    ("train --model num_hidden_layers=100000000", "num_hidden_layers must be at most 10000, got 100000000"),
    ("train --model vocab_size=99999999999999", "vocab_size must be at most 134217728, got 99999999999999"),
    ("train --model hidden_size=99999999999999", "hidden_size must be at most"),
    (f"train --model hidden_size={DIGITS}", "hidden_size must be at most"),
    ("train --threads 1000000", "threads must be at most 1024, got 1000000"),
    ("train --batch 100000000000", "batch must be at most 1048576, got 100000000000"),
    ("train --context 999999999999", "context must be at most 16777216, got 999999999999"),
    ("train --eval-examples 100000000000000", "eval_examples must be at most 16777216, got 100000000000000"),
    (f"train --tokenizer bpe:{DIGITS}", "is too large: a model has at most 134217728 tokens"),
    ("train --data task:recall:key_length=100000", "key_length must be at most 12, got 100000"),
    ("train --data task:local:symbols=10000000000", "symbols must be at most 1048576, got 10000000000"),
    (f"train --steps {DIGITS}", "expected an integer such as 500, 300k or 2M"),
    # a run
    ("train --steps -1", "steps must not be negative, got -1"),
    ("train --seed -1", "seed must not be negative, got -1"),
    ("train --tokens 5", "steps (1) and tokens (5) are both given; give one of them"),
    ("train --device cuda", "torch finds no GPU here; give cpu"),
    ("train --model hidden_size", "--model hidden_size changes nothing"),
    ("train --model hiden_size=32", "no option 'hiden_size' (did you mean 'hidden_size'?)"),
    ("train --model vocab_size=5", "the data has 49 tokens, model.vocab_size is 5"),
    ("train --preset nanoo", "did you mean 'nano'"),
    ("train --report-to tensorbord", "unknown report_to 'tensorbord' (did you mean 'tensorboard'?)"),
    ("train --train new", "train=new chooses from a saved model"),
    ("train --tokenizer ''", "tokenizer is empty"),
    ("train --tokenizer bpe:0", "tokenizer 'bpe:0' is too small"),
    ("train --data task:recall:name=3", "recall has no option 'name'"),
    ("train --data task:recall:summary=3", "its options are context, pairs, values, keys, key_length"),
    # a saved model
    ("generate nowhere", "there is no folder nowhere"),
    ("generate bare", "has no config.json"),
    ("generate ours/config.json", "is a file; give the folder that has config.json and the weights"),
    ("generate hf", "twoaxis retrofit hf --stream denseformer --out hf-denseformer"),
    ("eval hf --data text", "is not a twoaxis model: model_type in its config.json is 'llama'"),
    ("inspect compared --prompt x", "such as compared/runs/a/model"),
    ("generate unfinished", "it is not finished, or was made with --no-save-model"),
    ("generate theirs", "add --use /home/me/my_stream.py"),
    ("generate pickled", "save them as safetensors"),
    (
        "generate saved --prompt x",
        "has no tokenizer (tokenizer.json, tokenizer_config.json); if its tokens are bytes, ",
    ),
    ("generate saved --bytes", "the prompt is empty: give some text with --prompt, or --prompt - to read it from"),
    ("generate saved --bytes --prompt x --tokens 0", "tokens must be at least 1, got 0"),
    ("generate saved --bytes --prompt x --temperature -1", "temperature must be a number from 0"),
    ("generate saved --bytes --prompt x --temperature nan", "temperature must be a number from 0"),
    ("generate saved --bytes --prompt x --temperature 1 --top-p 1.5", "top_p must be in (0, 1], got 1.5"),
    ("generate saved --bytes --prompt x --top-p 0.9", "top_p=0.9 has no effect at temperature 0"),
    ("eval saved --bytes", "there is nothing to evaluate: name text files or folders with --data"),
    ("eval saved --data text", "has no tokenizer"),
    ("eval saved --bytes --data saved/model.safetensors", "model.safetensors is not "),
    ("eval saved --bytes --data text --context 1", "context must be at least 2"),
    ("eval saved --bytes --data text --context 8 --stride 8", "stride must be from 1 to 7"),
    ("eval saved --bytes --data text --batch 0", "batch must be at least 1, got 0"),
    ("eval saved --bytes --data text --max-tokens 0", "max_tokens must be at least 1, got 0"),
    # costs and advice
    ("cost --hardware h101", "unknown hardware 'h101' (did you mean 'h100'?); give one of a100, h100"),
    ("cost --hardware no/p.json", "there is no hardware profile no/p.json; make one with twoaxis cost"),
    ("cost --hardware FILE", "FILE is not a JSON document", "[1"),
    ("cost --hardware FILE", "hardware profile FILE is damaged at the whole: a table is wanted, got []", "[]"),
    (
        "cost --hardware FILE",
        "hardware profile FILE is damaged at kind: it is missing. Copy an entry of",
        '{"title": "x"}',
    ),
    ("cost --hardware FILE", "unknown kind 'tpu' (did you mean 'gpu'?); it is one of gpu, cpu", profile(kind="tpu")),
    ("cost --hardware FILE", "bandwidth must be a finite number, got 'fast'", profile(bandwidth="fast")),
    ("cost --hardware FILE", "is damaged at matmul.float16: it is missing. Copy", profile(matmul={"bfloat16": 1})),
    ("cost --hardware FILE", "is damaged at clock.overhead: it is missing. Copy", profile(clock={})),
    ("cost --save p.json", "--save keeps times of this machine: give --hardware here, got 'h100'"),
    ("cost --grid --stream deep_delta", "--grid pairs streams with mixers; give at least one"),
    ("cost --published --stream deep_delta --sites", "--published runs on methods of its own;"),
    ("cost --shape lama-3-8b", "unknown shape 'lama-3-8b' (did you mean 'llama-3-8b'?); give a config.json"),
    ("cost --shape no/where.json", "there is no configuration file no/where.json"),
    ("cost --shape FILE", "FILE is not a JSON document", "{"),
    ("cost --shape FILE", "FILE has no model_type", "{}"),
    ("cost --shape FILE", "transformers has no family 'lama' of causal language", family(model_type="lama")),
    ("cost --shape FILE", "text_config.hidden_size must be an integer, got 'big'", family(hidden_size="big")),
    ("cost --shape FILE", "num_hidden_layers must be at least 1, got 0", family(num_hidden_layers=0)),
    ("cost --shape nano --virtual-stages 2", "2 virtual stages need a pipeline: give pipeline_stages of at least 2"),
    ("cost --shape nano --sequence-parallel", "sequence parallelism needs tensor parallelism: give tensor_parallel"),
    ("cost --shape nano --context 64 --prefill-chunk 65", "a prefill chunk of 65 is longer than the context of 64"),
    ("cost --shape nano --micro-batch 0", "micro_batch must be at least 1, got 0"),
    ("advise --shape nano --serving 2", "serving must lie between 0 and 1, got 2"),
    ("advise --shape nano --hardware h10", "unknown hardware 'h10' (did you mean 'h100'?)"),
    ("advise --shape nano --max-overhead -1", "max_overhead must not be negative, got -1"),
    ("advise --shape nano --headroom -1", "headroom must not be negative, got -1"),
    ("advise --shape nano --top 0", "--top must be at least 1, got 0"),
    ("advise --shape nano --evidence nowhere.json", "there is no evidence file nowhere.json"),
    ("advise --records nothing", "there is no record of 'nothing'"),
]


def write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what people have lying about."""
    place = tmp_path_factory.mktemp("place")
    for name in ("bare", "saved"):
        (place / name).mkdir()
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "max_position_embeddings": 64}
    save_decoder(place / "saved", Decoder(preset("nano", vocab_size=260, **shape)))
    write(place / "text" / "a.txt", "some text")
    (place / "exits.py").write_text("raise SystemExit(0)")
    write(place / "hf" / "config.json", {"model_type": "llama"})
    write(place / "compared" / "compare.json", {})
    write(place / "compared" / "runs" / "a" / "model" / "config.json", {"model_type": "twoaxis"})
    write(place / "unfinished" / "run.json", {})
    for name in ("ours", "theirs", "pickled"):
        write(place / name / "config.json", {"model_type": "twoaxis", "stream": "standard"})
        (place / name / ("model.bin" if name == "pickled" else "model.safetensors")).write_bytes(b"")
    origin = {"file": "/home/me/my_stream.py", "sha256": "0"}
    write(place / "theirs" / "methods.json", {"format": 1, "methods": {"my_stream": origin}})
    return place


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0][:60])
def test_a_mistake_is_one_line_and_leaves_nothing(mistake: tuple[str, ...], place: Path, tmp_path: Path) -> None:
    line, message, *content = mistake
    words = shlex.split(line)
    if words[0] == "train":
        words += [word for option, value in USUAL.items() if option not in words for word in (option, value)]
    file = tmp_path / "file.json"
    file.write_text("".join(content))
    before = set(place.rglob("*"))
    done = run(*(str(file) if word == "FILE" else word for word in words), folder=place)
    assert (done.code, done.out) == (2, ""), done.out + done.err
    (said,) = done.err.replace(str(file), "FILE").splitlines()
    assert said.startswith("twoaxis: ")
    assert message in said
    assert set(place.rglob("*")) == before


def test_a_missing_package_names_the_line_that_installs_it(place: Path) -> None:
    with mock.patch.dict(sys.modules, {"transformers": None}):
        done = run("retrofit", "hf", "--out", "out", folder=place)
    assert done.code == 2
    assert 'pip install -e ".[lab]" (in a clone of twoaxis)' in done.err
    hidden = "import sys; sys.modules['transformers'] = None; from twoaxis.cli import main; main(sys.argv[1:])"
    assert run_child("cost", "--shape", str(place / "hf"), program=("-c", hidden)) == done


# Random ones.

NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**63, 10**30, -1, 0.5]))
WORDS = st.one_of(st.booleans(), st.none(), st.text(max_size=8), st.sampled_from(["all", "1-"]))
VALUES = st.one_of(NUMBERS, WORDS, st.lists(NUMBERS, max_size=3))


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
