"""The numbers on docs/howto/transformers.md and the keys on docs/reference/files_and_keys.md are measured here."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.model.graft_helpers import grafted
from twoaxis import mixer_names, stream_names
from twoaxis.model.decoder import Decoder
from twoaxis.model.presets import preset

DOCS = Path(__file__).parent.parent.parent / "docs"


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the table of a page whose first column has that heading."""
    text = (DOCS / page).read_text()
    rows = re.search(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert rows is not None, heading
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1].splitlines()]


def value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text  # a bare word


def method(spelled: str) -> tuple[str, dict[str, Any]]:
    name, _, options = spelled.strip("`").partition(":")
    return name, {k: value(v) for k, v in (pair.split("=") for pair in options.split(",") if pair)}


CACHE = table("howto/transformers.md", "method")


def name_of(row: list[str]) -> str:
    return row[0].strip("`")


def between_tokens(spelled: str, blocks: int) -> dict[str, int]:
    """Bytes that a method keeps after 8,192 tokens, by part, in a model of Llama 3's width."""
    name, options = method(spelled)
    kind = "stream" if name in stream_names() else "mixer"
    config = preset("llama-3-8b", num_hidden_layers=blocks, **{kind: name, f"{kind}_options": options})
    with torch.device("meta"):
        model = Decoder(config).bfloat16()
        _, past = model.step(torch.zeros(1, 8192, dtype=torch.long), model.start(), logits_to_keep=1)
    return past.nbytes_by_part()


@pytest.mark.parametrize("row", CACHE, ids=name_of)
def test_bytes_between_tokens(row: list[str]) -> None:
    """On 32 blocks; each block beyond the third adds what the third does, which one row shows on all of them."""
    two, three = between_tokens(row[0], 2), between_tokens(row[0], 3)
    parts = {part: two[part] + 30 * (three[part] - two[part]) for part in two}
    assert [f"{parts[part]:,}" for part in ("attention", "local", "stream")] == row[1:]
    if "compress=token" in row[0]:
        assert parts == between_tokens(row[0], 32)


def test_every_method_has_its_bytes() -> None:
    names = [method(row[0])[0] for row in CACHE]
    assert {*names} == {*stream_names(), *mixer_names()}


def test_bytes_by_hand() -> None:
    found = {row[0].strip("`"): [int(cell.replace(",", "")) for cell in row[1:]] for row in CACHE}
    keys_and_values = 2 * 32 * 8 * 128 * 8192 * 2
    taps = 3 * 4096 * 4 * 2  # three earlier states of four channels, two bytes each
    assert found["standard"] == [keys_and_values, 0, 0]
    assert found["deep_delta:value_channels=4,compress=token"] == [keys_and_values, 0, (2 * 32 + 1) * taps]
    assert found["short_conv"] == [keys_and_values, 32 * 3 * 4096 * 2, 0]


@pytest.mark.parametrize(("method", "marker"), [("two axes", "twoaxis_before"), ("short_swa", "twoaxis_mixer")])
def test_every_key_is_on_the_page(method: str, marker: str) -> None:
    """Each documented spelling as a pattern, four dots for anything; a family's own keys fit the first one alone."""
    patterns = []
    for cell, *_ in table("reference/files_and_keys.md", "key"):
        spelled = re.escape(cell.strip("`")).replace(r"\{b\}", r"\d+").replace(r"\.\.\.\.", r"\..+")
        spelled = re.sub(r"\\\{(.*?)\\\}", lambda found: f"(?:{found[1].replace(',', '|')})", spelled)
        patterns.append(re.compile(spelled.replace(r"\..+layers", r"\..*layers")))
    keys = grafted("llama", method).state_dict()
    assert any(marker in key for key in keys)
    for key in keys:
        fits = [number for number, pattern in enumerate(patterns) if pattern.fullmatch(key)]
        ours = "twoaxis_" in key
        assert len(fits) == (2 if ours else 1), key
        assert (fits[0] == 0) == key.startswith("backbone."), key
