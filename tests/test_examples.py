"""The example: the stranger's GPT and ours differ in five lines, and the plain stream changes nothing."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

import twoaxis

FOLDER = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_five_changed_lines() -> None:
    before, after = ((FOLDER / f"{name}.py").read_text() for name in ("tiny_gpt", "tiny_gpt_with_a_stream"))
    body = [text.partition('"""\n\n')[2].splitlines() for text in (before, after)]
    added = [line for line in difflib.ndiff(body[0], body[1]) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) == 5, added
    assert 50 <= sum(bool(line.strip()) for line in body[0]) <= 70


def test_the_plain_stream_changes_nothing_and_the_other_trains() -> None:
    plain, ours = load("tiny_gpt"), load("tiny_gpt_with_a_stream")
    first, second = plain.GPT(), ours.GPT()
    second.stream = twoaxis.stream("standard", blocks=4, width=64)
    second.load_state_dict(first.state_dict())
    tokens = torch.randint(0, 256, (2, 20))
    assert torch.equal(first(tokens), second(tokens))
    torch.manual_seed(0)
    model = ours.GPT()
    assert ours.train(model, steps=30) < 4.5
    assert model.stream.query.abs().max() > 0
