"""The document of an inspection: its numbers against the trace, its sources, and what the tables say of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

import twoaxis
from tests.inspection.helpers import PROMPT, document, make
from twoaxis.base.method import NamedRange, Quantity
from twoaxis.data.tokenizer import Bytes, Encoded
from twoaxis.depth.standard import Standard
from twoaxis.depth.stream import Layout
from twoaxis.inspection import document as documents
from twoaxis.inspection.document import describe, inspect_prompt, merge_sources, pieces
from twoaxis.inspection.files import prepare_folder, write_files
from twoaxis.inspection.tables import tables
from twoaxis.show import terminal
from twoaxis.show.document import Table

METHODS: list[dict[str, Any]] = [
    {"stream": "attention_residuals"},
    {"stream": "deep_delta", "mixer": "canon"},
    {"stream": "hyper_connections", "mixer": "short_swa", "mixer_options": {"window": 3, "start": "normal"}},
    {"stream": "muddformer"},
    {"stream": "manifold_hyper_connections", "blend": True},
    {"stream": "standard"},
]


@pytest.mark.parametrize("changes", METHODS, ids=lambda c: c["stream"])
def test_every_number_is_the_trace_s(changes: dict[str, Any]) -> None:
    model = make(**changes)
    made = inspect_prompt(model, Bytes(), PROMPT, name="m")
    json.dumps(made, allow_nan=False)
    ids = list(PROMPT.encode())
    with torch.no_grad(), twoaxis.trace(model) as seen:
        model(torch.tensor([ids]), use_cache=False)
    assert [token["id"] for token in made["tokens"]] == ids
    assert made["shown"] == list(range(len(ids)))
    assert made["parameters"] == sum(p.numel() for p in model.parameters())
    assert made["stream"] == changes["stream"]

    def same(series: dict[str, Any], value: torch.Tensor) -> None:
        torch.testing.assert_close(torch.tensor(series["tokens"]), value[0], rtol=1e-5, atol=1e-9, check_dtype=False)
        torch.testing.assert_close(
            torch.tensor(series["mean"]), value[0].mean(0), rtol=1e-4, atol=1e-6, check_dtype=False
        )

    for site, look in zip(made["sites"], seen, strict=True):
        assert (site["index"], site["block"], site["kind"]) == (look.site.index, look.site.block, look.site.kind)
        assert [made["columns"][i] for i in site["sources"]] == list(look.sources)
        for key in ("weights", "norm", "increment", "cosine"):
            value = getattr(look, key)
            assert (site[key] is None) == (value is None)
            if value is not None:
                same(site[key], value)
        if look.effective is not None:
            same(site["effective"], look.effective.mean(-1))
        probes = [*look.probes.items(), *(pair for inner in look.inner for pair in inner.probes.items())]
        told = [*site["probes"], *(p for inner in site["inner"] for p in inner["probes"])]
        assert len(probes) == len(told)
        for (name, probe), entry in zip(probes, told, strict=True):
            assert (entry["name"], entry["axes"]) == (name, list(probe.axes))
            if probe.per_token:
                same(entry, probe.value)
            else:
                assert entry["tokens"] is None
                assert torch.tensor(entry["mean"]).tolist() == pytest.approx(probe.value.tolist(), rel=1e-5)
            assert ("regimes" in entry) == bool(probe.regimes)
            if probe.regimes:
                assert sum(regime["share"] for regime in entry["regimes"]) == pytest.approx(1.0, abs=1e-5)


def test_long_prompts_show_evenly_spaced_tokens_and_average_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = document("abcdefghijklmnopqrstuvwxyz", stream="attention_residuals")
    assert whole["shown"] == list(range(26))
    monkeypatch.setattr(documents, "BUDGET", 6 * (15 + 5 * (3 + 1)))  # 15 weights at 5 sites
    some = document("abcdefghijklmnopqrstuvwxyz", stream="attention_residuals")
    assert some["shown"] == [0, 5, 10, 15, 20, 25]
    for a, b in zip(whole["sites"], some["sites"], strict=True):
        assert a["norm"]["mean"] == b["norm"]["mean"]
        assert [a["norm"]["tokens"][i] for i in some["shown"]] == b["norm"]["tokens"]
        assert len(b["weights"]["tokens"]) == 6
    monkeypatch.setattr(documents, "BUDGET", 1)
    assert document("abc")["shown"] == [0]


def test_sources_are_merged_in_an_order_all_sites_agree_with() -> None:
    assert merge_sources([]) == []
    assert merge_sources(
        [("embedding",), ("embedding", "partial"), ("embedding", "run 0"), ("embedding", "run 0", "run 1", "partial")]
    ) == [
        "embedding",
        "run 0",
        "run 1",
        "partial",
    ]
    assert merge_sources([("block 0",), ("embedding", "block 1"), ("block 0", "block 2")]) == [
        "embedding",
        "block 0",
        "block 1",
        "block 2",
    ]
    assert merge_sources([("embedding", "block 0"), ("embedding", "overflow", "block 1")]) == [
        "embedding",
        "block 0",
        "overflow",
        "block 1",
    ]
    assert sorted(merge_sources([("a", "b"), ("b", "a")])) == ["a", "b"]  # no such order: still each once


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), max_size=6))
def test_merging_keeps_sorted_lists_sorted(lists: list[list[int]]) -> None:
    named = [[f"block {i}" for i in sorted(numbers)] for numbers in lists]
    merged = merge_sources(named)
    assert sorted(merged) == sorted({name for names in named for name in names})
    for names in named:
        assert [merged.index(name) for name in names] == sorted(merged.index(name) for name in names)


def test_pieces_of_text() -> None:
    encoded = Encoded(np.array([1, 7, 8, 9, 5]), np.array([0, 1, 1, 1, 2]))
    assert [p["text"] for p in pieces(encoded, "aüéé"[:3] + "")] == ["", "a", "\\xc3", "\\xbc", "é"]
    assert "".join(p["text"] for p in document("a </script>")["tokens"]) == "a </script>"


@given(st.text(min_size=1, max_size=12))
def test_pieces_hold_every_byte(words: str) -> None:
    encoded = Bytes().encode([words], sizes=True, prompt=True)[0]
    found = pieces(encoded, words)
    assert len(found) == len(words.encode())
    for piece, byte in zip(found, words.encode(), strict=True):
        assert piece["text"] == (chr(byte) if byte < 128 else f"\\x{byte:02x}")


def test_what_is_no_number_is_null_and_the_tables_say_so() -> None:
    model = make(stream="attention_residuals")
    with torch.no_grad():
        model.model.embed_tokens.weight[ord("b")] = math.nan
    made = inspect_prompt(model, Bytes(), "ab")
    json.dumps(made, allow_nan=False)
    assert made["sites"][0]["norm"]["mean"] is None
    assert made["sites"][0]["norm"]["tokens"][0] > 0
    assert made["sites"][0]["norm"]["tokens"][1] is None
    assert " - " in terminal.render(tables(made))


def test_refusals_and_the_mode_of_the_model() -> None:
    model = make().train()
    with pytest.raises(ValueError, match="the prompt is empty"):
        inspect_prompt(model, Bytes(), "")
    with pytest.raises(ValueError, match="the prompt has 65 tokens, the model is made for 64: shorten it"):
        inspect_prompt(model, Bytes(), "x" * 65)
    assert len(inspect_prompt(model, Bytes(), "x" * 64)["tokens"]) == 64
    assert model.training


def heads(table: Table) -> tuple[str, ...]:
    return tuple(column.head for column in table.columns)


def test_tables_have_the_document_s_numbers() -> None:
    made = document(stream="deep_delta", mixer="short_swa", mixer_options={"window": 3, "start": "normal"})
    shown = tables(made)
    found = [block for block in shown.blocks if isinstance(block, Table)]
    assert heads(found[0]) == (
        "site",
        "read",
        "increment",
        "cosine",
        "gate",
        "discrepancy, before the write",
        "discrepancy, after the write",
    )
    assert [row[0].text for row in found[0].rows] == [
        "0 mixer",
        "0 attention",
        "0 mlp",
        "1 mixer",
        "1 attention",
        "1 mlp",
        "out",
    ]
    for row, site in zip(found[0].rows, made["sites"], strict=True):
        assert float(row[1].text) == pytest.approx(site["norm"]["mean"], rel=1e-3)
        assert (row[4].text == "-") == (site["kind"] == "out")
    assert heads(found[1])[1] == "skip 0 to 0.1"
    for row in found[1].rows:
        assert sum(float(cell.text.rstrip("%")) for cell in row[1:]) == pytest.approx(100, abs=0.25)
    assert heads(found[2]) == ("site", *(str(i) for i in range(12)))[:1] + tuple(
        f"{h},{d}" for h in range(4) for d in range(3)
    )
    words = terminal.render(shown, 120)
    assert "deep_delta; mixer short_swa:window=3,start=normal; 2 blocks of width 32" in words
    attention = tables(document(stream="attention_residuals"))
    rows = next(block for block in attention.blocks if isinstance(block, Table)).rows
    assert rows[0][-1].text == "embedding 1"
    assert rows[0][-2].text == "1"
    wide = terminal.render(tables(document(mixer="short_swa", mixer_options={"window": 20})))
    assert "Mean over every head, by distance." in wide
    assert "4 more are in the files that --out writes." in wide


def test_a_stream_of_one_s_own_is_shown_with_all_it_tells(tmp_path: Path) -> None:
    layout = Layout.make(2, 8, kinds=[("attention",), ("attention", "mlp")])
    stream = Told(Standard.Config(), layout)
    run = twoaxis.compose(stream, [(site.kind, None, torch.nn.Linear(8, 8)) for site in stream.sites])
    with torch.no_grad(), twoaxis.trace(run) as seen:
        run(torch.randn(1, 5, 8))
    facts = document("abcde")
    made = facts | describe(seen)
    json.dumps(made, allow_nan=False)
    ratio = seen[1].increment / seen[1].norm  # type: ignore[operator]
    told = {probe["name"]: probe for probe in made["sites"][1]["probes"]}
    assert told["growth"]["mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert told["growth"]["regimes"] == [
        {"name": "small", "range": "up to 1", "share": pytest.approx((ratio < 1).float().mean().item())},
        {"name": "large", "range": "from 1", "share": pytest.approx((ratio >= 1).float().mean().item())},
    ]
    assert told["parts"]["mean"] == [0.0, 1.0]
    words = terminal.render(tables(made))
    assert "REGIMES OF THE GROWTH, SHARE OF TOKENS" in words
    assert [line.split() for line in words.split("PARTS")[1].splitlines()[6:9]] == [
        ["0", "attention", "0", "-"],
        ["1", "attention", "0", "1"],
        ["1", "mlp", "0", "1"],
    ]
    assert "cube" not in words.lower()  # three axes are in the document only
    assert {name for site in json.loads(json.dumps(made))["sites"] for name in [p["name"] for p in site["probes"]]} == {
        "growth",
        "parts",
        "cube",
    }
    pytest.importorskip("matplotlib")
    written, _ = write_files(prepare_folder(tmp_path), made)
    assert {path.name for path in written} == {"inspect.html", "inspect.json", "depth.png", "depth.svg"}


class Told(Standard):
    """Tells a number with open-ended regimes, a vector that grows, and something of three axes."""

    def _quantities(self, value: Any, site: Any, y: Any, seen: Any, c: Any) -> dict[str, Quantity]:
        if y is None:
            return {}
        regimes = (NamedRange("small", -math.inf, 1.0), NamedRange("large", 1.0, math.inf))
        return {
            "growth": Quantity(y.norm(dim=-1) / seen.x.norm(dim=-1), regimes=regimes),
            "parts": Quantity(torch.arange(1 + min(site.index, 1)), ("part",)),
            "cube": Quantity(torch.zeros(*y.shape[:-1], 2, 2, 2), ("a", "b", "c")),
        }
