"""What `twoaxis retrofit` writes and prints, and that it writes all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from tests.pretrained.helpers import tokens
from tests.support.commands import run
from tests.support.foreign import byte_llama, save
from tests.support.processes import start
from twoaxis.base.files import Claimed
from twoaxis.data.tokenizer import load_tokenizer
from twoaxis.model.generate import generate
from twoaxis.model.load import load_model
from twoaxis.pretrained.record import read_record
from twoaxis.pretrained.retrofit import retrofit


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in two files, with a tokenizer, a chat template and settings for generation."""
    model = byte_llama()
    assert model.generation_config is not None
    model.generation_config.max_new_tokens = 7
    model.generation_config.repetition_penalty = 1.1
    return save(model, tmp_path_factory.mktemp("source") / "model", max_shard_size="120KB")


def test_everything_comes_along(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    made = retrofit(source, stream="attention_residuals:block_size=2", mixer="short_swa:heads=2", out=out, tokens=40)
    assert len(list(source.glob("model-*.safetensors"))) > 1
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "model.safetensors", "retrofit.json", "modeling_twoaxis.py", "tokenizer.json"}
    assert names >= {"generation_config.json", "chat_template.jinja"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    loaded: Any = load_model(out, "cpu")
    given = tokens(vocabulary=300)
    with torch.no_grad():
        assert (loaded(given).logits - made.model(given).logits).abs().max() < 1e-6
        assert (made.model(given).logits - byte_llama()(given).logits).abs().max() < 1e-5
    assert loaded.generation_config.max_new_tokens == 7
    assert loaded.generation_config.repetition_penalty == 1.1
    assert loaded.generation_config.eos_token_id == 299
    old, new = (AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in (source, out))
    words = [{"role": "user", "content": "Grüße"}]
    assert new.apply_chat_template(words, tokenize=False) == "user: Grüße\n"
    assert new("Grüße").input_ids == old("Grüße").input_ids
    said: list[str] = []
    tokenizer = load_tokenizer(out, loaded.config.vocab_size)
    assert generate(loaded, tokenizer, "Once", tokens=4, say=said.append).tokens == 4
    assert read_record(out) == made.record
    document = json.loads((out / "retrofit.json").read_text())
    digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in source.glob("*.safetensors")}
    assert document["source"] == {"name": str(source), "kind": "folder", "family": "llama", "sha256": digests}
    assert document["method"]["stream_options"] == {"block_size": 2, "read": "sum"}
    assert document["neutral"] == "rounding"
    assert set(document["versions"]) == {"twoaxis", "torch", "transformers", "python"}


def test_sampling_settings_beside_greedy_decoding_do_not_stop_the_writing(tmp_path: Path) -> None:
    model: Any = byte_llama()
    save(model, tmp_path / "source")
    path = tmp_path / "source" / "generation_config.json"
    settings = {**json.loads(path.read_text()), "temperature": 0.6, "top_p": 0.9, "cache_implementation": "static"}
    path.write_text(json.dumps(settings))
    retrofit(tmp_path / "source", out=tmp_path / "out", tokens=8)
    loaded: Any = load_model(tmp_path / "out", "cpu")
    assert loaded.generate(tokens(length=4), max_new_tokens=3).shape == (2, 7)


def test_a_run_that_fails_while_writing_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import twoaxis.pretrained.retrofit as module

    out = tmp_path / "out"
    for error in (KeyboardInterrupt(), RuntimeError("boom")):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(module, "write_record", fail)  # the weights are written by then
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            retrofit(source, out=out, tokens=8)
        assert not any(tmp_path.iterdir())
    monkeypatch.undo()
    out.mkdir()
    retrofit(source, out=out, tokens=8)  # an empty folder is as good as none
    assert read_record(out) is not None


def test_a_full_disk_ends_in_one_line(source: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, kept[1]))
    try:
        done = run("retrofit", str(source), "--out", str(tmp_path / "out"), "--tokens", "8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"twoaxis: {tmp_path / 'out'} cannot be written: File too large"
    assert not (tmp_path / "out").exists()


def test_the_folder_is_claimed_while_it_is_made(source: Path, tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def meanwhile(line: str) -> None:
        if line == "reading the configuration":
            with pytest.raises(Claimed, match=f"{out} is in use by another process"):
                retrofit(source, out=out, tokens=8)
            refused.append(line)

    retrofit(source, out=out, tokens=8, say=meanwhile)
    assert refused
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_an_interrupt_at_any_time_leaves_nothing_half_written(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("retrofit", str(source), "--out", str(out), "--stream", "muddformer")
    for wait in ("reading", "running the source", "writing"):
        process = start(*words, stdout=None)
        assert process.stderr is not None
        for line in process.stderr:
            if wait in line:
                break
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        done = out.is_dir()
        assert code == (0 if done else 130)
        assert [path.name for path in tmp_path.iterdir()] == (["out"] if done else [])
        if done:
            load_model(out, "cpu")
            for file in out.iterdir():
                file.unlink()
            out.rmdir()
        time.sleep(0.01)


def test_the_command_prints_what_it_did(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "retrofit",
        str(source),
        "--out",
        str(out),
        "--stream",
        "hyper_connections:streams=2",
        "--tokens",
        "30",
    ]
    shown = run(*arguments, "--mixer", "canon:set=AC", "--mixer-blocks", "0,2-3", "--placement", "1-4")
    assert shown.code == 0, shown.err
    record = read_record(out)
    assert record is not None
    assert record.method["mixer_blocks"] == [0, 2, 3]
    assert record.method["placement"] == "1-4"
    assert "differ from the source's by at most 0, bit for bit" in shown.out
    assert "likeliest token equal at 30 of 30" in shown.out
    assert f"{record.added_parameters:,} parameters (" in shown.out
    assert f"{record.added_bytes:,} bytes" in shown.out
    assert "note: hyper_connections:readout=mean is taken" in shown.err
    assert "retrofit: loading the source" in shown.err
    assert "%|" not in shown.err  # a bar of transformers
    again = run(*arguments)
    assert again.code == 2
    assert "exists and is not an empty folder" in again.err


def test_the_command_prints_json_and_warnings(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stream = "deep_cross_attention:relu=literal"
    arguments = ["--out", str(out), "--stream", stream, "--tokens", "9", "--dtype", "float64"]
    shown = run("retrofit", str(source), *arguments, "--json")
    assert shown.code == 0, shown.err
    document = json.loads(shown.out)
    assert (document["dtype"], document["measured"]["text"]["tokens"]) == ("float64", 9)
    assert document == json.loads((out / "retrofit.json").read_text()) | {"folder": str(out)}
    warning = next(line for line in shown.err.splitlines() if line.startswith("warning: "))
    assert "no gradient for stream.token.0, stream.token.1" in warning
    assert "2 more: w is zero" in warning


def test_the_command_refuses(source: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    for arguments, message in {
        ("--stream", "deep_delta", "--no-blend"): "its class is 'none') and Blend is refused",
        ("--mixer", "canon", "--mixer-blocks", "attention"): "names no blocks",
    }.items():
        done = run("retrofit", str(source), *out, *arguments)
        assert done.code == 2
        assert message in done.err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_storm_of_kills_leaves_a_whole_folder_or_none(source: Path, tmp_path: Path) -> None:
    """Fifty processes killed at random times: what they leave unfinished is swept by the next."""
    out, made = tmp_path / "out", []
    given = tokens(1, 12)
    expected = retrofit(source, stream="muddformer", tokens=8).model(given, use_cache=False).logits

    def launch() -> int:
        child = os.fork()
        if child == 0:
            try:
                retrofit(source, stream="muddformer", out=out, tokens=8)
            finally:
                os._exit(0)
        return child

    began = time.monotonic()
    os.waitpid(launch(), 0)
    whole = time.monotonic() - began
    shutil.rmtree(out)
    numbers = random.Random(0)
    for _ in range(50):
        child = launch()
        time.sleep(numbers.uniform(0, 1.05 * whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = sorted(path.name for path in tmp_path.iterdir() if path.name != "out")
        assert len([name for name in left if "partial" in name]) <= 1, left  # the one of the last process alone
        if out.exists():
            assert torch.equal(load_model(out, "cpu")(given, use_cache=False).logits, expected)
            shutil.rmtree(out)
            made.append(len(made))
    assert len(made) < 50
    retrofit(source, stream="muddformer", out=out, tokens=8)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
