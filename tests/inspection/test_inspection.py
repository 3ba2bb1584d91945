"""An inspection: its numbers against the trace, its sources and tokens, and what is shown and saved of it."""

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
from tests.inspection.helpers import PROMPT, look, make
from tests.model.graft_helpers import grafted, logits, tokens
from twoaxis.base.method import NamedRange, Quantity
from twoaxis.data.tokenizer import Bytes, Encoded
from twoaxis.depth.standard import Standard
from twoaxis.depth.stream import Layout
from twoaxis.inspection import inspection
from twoaxis.inspection.inspection import Inspection, describe, inspect, merge_sources, pieces
from twoaxis.show import terminal
from twoaxis.show.charts import Chart, Grid
from twoaxis.show.document import Prose, Table

METHODS: list[dict[str, Any]] = [
    {"stream": "attention_residuals"},
    {"stream": "deep_delta", "mixer": "canon"},
    {"stream": "hyper_connections", "mixer": "short_swa", "mixer_options": {"window": 3, "start": "normal"}},
    {"stream": "muddformer"},
    {"stream": "manifold_hyper_connections", "blend": True},
    {"stream": "standard"},
]


def only(found: Inspection) -> dict[str, Any]:
    (model,) = found.models
    return model


def block(found: Inspection, kind: type, name: str) -> Any:
    return next(b for b in found.document().blocks if isinstance(b, kind) and getattr(b, "name", name) == name)


@pytest.mark.parametrize("changes", METHODS, ids=lambda c: c["stream"])
def test_every_number_is_the_trace_s_and_every_one_is_shown(changes: dict[str, Any]) -> None:
    model = make(**changes)
    found = inspect(model, Bytes(), PROMPT, name="m")
    made, ids = only(found), list(PROMPT.encode())
    json.dumps(found.to_dict(), allow_nan=False)
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

    grids = {b.name: b for b in found.document().blocks if isinstance(b, Grid)}
    for number, (site, record) in enumerate(zip(made["sites"], seen, strict=True)):
        assert (site["index"], site["block"], site["kind"]) == (number, record.site.block, record.site.kind)
        assert [made["columns"][i] for i in site["sources"]] == list(record.sources)
        row = grids["sites"].rows[number]
        for key in ("weights", "norm", "increment", "cosine"):
            value = getattr(record, key)
            assert (site[key] is None) == (value is None)
            if value is not None:
                same(site[key], value)
        assert row.label == site["label"]
        assert row.values[0][0] == site["norm"]["mean"]
        assert [level[0] for level in row.values[1:]] == site["norm"]["tokens"]
        if record.effective is not None:
            same(site["effective"], record.effective.mean(-1))
        inner = {f"{i.name}: {name}": probe for i in record.inner for name, probe in i.probes.items()}
        for (name, probe), entry in zip((record.probes | inner).items(), site["quantities"], strict=True):
            assert (entry["name"], entry["axes"], entry["meaning"]) == (name, list(probe.axes), probe.meaning)
            assert probe.meaning, f"{name} does not say what it means"
            assert any(f": {probe.meaning}." in grid.note for grid in grids.values())
            if probe.per_token:
                same(entry, probe.value)
            else:
                assert entry["tokens"] is None
                assert torch.tensor(entry["mean"]).tolist() == pytest.approx(probe.value.tolist(), rel=1e-5)
            assert ("regimes" in entry) == bool(probe.regimes)
            if probe.regimes:
                assert sum(regime["share"] for regime in entry["regimes"]) == pytest.approx(1.0, abs=1e-5)
    weighted = [site for site in made["sites"] if site["weights"]]
    assert ("sources" in grids) == bool(weighted)
    for site, row in zip(weighted, grids["sources"].rows if weighted else (), strict=True):
        ways = site["weights"]["tokens"][3]
        at = row.values[4]  # of token 3: all ways behind their mean, where a site has several
        several = "way" in grids["sources"].choices
        assert (at[1:] if several and len(ways) > 1 else at if several else [at]) == ways
        assert row.columns == tuple(site["sources"])


def test_long_prompts_show_evenly_spaced_tokens_and_average_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    whole = only(look(text, stream="attention_residuals"))
    assert whole["shown"] == list(range(26))
    monkeypatch.setattr(inspection, "BUDGET", 6 * (15 + 5 * (3 + 1)))  # 15 weights at 5 sites
    found = look(text, stream="attention_residuals")
    some = only(found)
    assert some["shown"] == [0, 5, 10, 15, 20, 25]
    assert [row["norm"] for row in found.rows()] == [site["norm"]["mean"] for site in whole["sites"]]
    last = {name: value for name, value in found.rows()[-1].items() if name in some["columns"]}
    assert sum(last.values()) == pytest.approx(1, abs=1e-5)  # a softmax over all sources
    for a, b in zip(whole["sites"], some["sites"], strict=True):
        assert a["norm"]["mean"] == b["norm"]["mean"]
        assert [a["norm"]["tokens"][i] for i in some["shown"]] == b["norm"]["tokens"]
        assert len(b["weights"]["tokens"]) == 6
    names = block(found, Grid, "sites").choices["token"]
    assert names == ("mean over 26", "0 a", "5 f", "10 k", "15 p", "20 u", "25 z")
    monkeypatch.setattr(inspection, "BUDGET", 1)
    assert only(look("abc"))["shown"] == [0]


def test_sources_are_merged_in_an_order_all_sites_agree_with() -> None:
    first, blocks = "embedding", [f"block {i}" for i in range(3)]
    for lists, merged in (
        ([], []),
        ([(first,), (first, "partial"), (first, "run 0", "run 1", "partial")], [first, "run 0", "run 1", "partial"]),
        ([(blocks[0],), (first, blocks[1]), (blocks[0], blocks[2])], [first, *blocks]),
        ([(first, blocks[0]), (first, "overflow", blocks[1])], [first, blocks[0], "overflow", blocks[1]]),
    ):
        assert merge_sources(lists) == merged
    assert sorted(merge_sources([("a", "b"), ("b", "a")])) == ["a", "b"]  # no such order: still each once


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), max_size=6))
def test_merging_keeps_sorted_lists_sorted(lists: list[list[int]]) -> None:
    named = [[f"block {i}" for i in sorted(numbers)] for numbers in lists]
    merged = merge_sources(named)
    assert sorted(merged) == sorted({name for names in named for name in names})
    for names in named:
        assert [merged.index(name) for name in names] == sorted(merged.index(name) for name in names)


@given(st.text(min_size=1, max_size=12))
def test_pieces_hold_every_byte(words: str) -> None:
    found = pieces(Bytes().encode([words], sizes=True, prompt=True)[0], words)
    assert len(found) == len(words.encode())
    for piece, byte in zip(found, words.encode(), strict=True):
        assert piece["text"] == (chr(byte) if byte < 128 else f"\\x{byte:02x}")


def test_pieces_of_text() -> None:
    encoded = Encoded(np.array([1, 7, 8, 9, 5]), np.array([0, 1, 1, 1, 2]))
    assert [p["text"] for p in pieces(encoded, "aüé")] == ["", "a", "\\xc3", "\\xbc", "é"]


def test_what_is_no_number_is_null_and_is_shown_as_missing() -> None:
    model = make(stream="attention_residuals")
    with torch.no_grad():
        model.embed_tokens.weight[ord("b")] = math.nan
    found = inspect(model, Bytes(), "ab")
    json.dumps(found.to_dict(), allow_nan=False)
    norm = only(found)["sites"][0]["norm"]
    assert norm["mean"] is norm["tokens"][1] is None
    assert norm["tokens"][0] > 0
    assert " - " in terminal.render(found.document())
    pytest.importorskip("matplotlib")
    assert "<svg" in found._repr_html_()


def test_refusals_and_the_mode_of_the_model() -> None:
    model = make().train()
    with pytest.raises(ValueError, match="the prompt is empty"):
        inspect(model, Bytes(), "")
    with pytest.raises(ValueError, match="the prompt has 65 tokens, the model is made for 64: shorten it"):
        inspect(model, Bytes(), "x" * 65)
    assert len(only(inspect(model, Bytes(), "x" * 64))["tokens"]) == 64
    assert model.training
    with pytest.raises(ValueError, match="side by side on one prompt"):
        _ = look("a") + look("b")


def test_what_is_shown() -> None:
    found = look(stream="deep_delta", mixer="short_swa", mixer_options={"window": 3, "start": "normal"})
    sites, made = block(found, Grid, "sites"), only(found)
    discrepancy = ("discrepancy, before the write", "discrepancy, after the write")
    assert sites.columns == ("read", "increment", "cosine", "gate", *discrepancy)
    labels = ["0 mixer", "0 attention", "0 mlp", "1 mixer", "1 attention", "1 mlp", "out"]
    assert [row.label for row in sites.rows] == labels
    assert [row.values[0][3] is None for row in sites.rows] == [label == "out" for label in labels]
    regimes = block(found, Table, "")
    assert regimes.columns[1].head == "skip 0 to 0.1"
    for row in regimes.rows:
        assert sum(float(cell.text.rstrip("%")) for cell in row[1:]) == pytest.approx(100, abs=0.25)
    window = block(found, Grid, "shortswa-attention")
    assert window.columns == tuple(f"{h},{d}" for h in range(4) for d in range(3))
    attention = made["sites"][0]["quantities"][-1]
    assert window.rows[0].values[2] == [entry for head in attention["tokens"][1] for entry in head]
    assert "deep_delta + short_swa:window=3,start=normal; 2 blocks" in terminal.render(found.document(), 120)
    depth = block(found, Chart, "depth")
    panels = {panel.title: panel.marks for panel in depth.panels}
    assert list(panels) == ["Length", "Cosine", "Gate", "Discrepancy"]
    read, increment = panels["Length"]
    assert read.y == tuple(site["norm"]["mean"] for site in made["sites"])
    assert increment.y == tuple(site["increment"]["mean"] for site in made["sites"][:-1])
    assert [line.label for line in panels["Discrepancy"]] == ["before the write", "after the write"]
    wide = block(look(mixer="short_swa", mixer_options={"window": 20}), Grid, "shortswa-attention")
    assert len(wide.columns) == 20
    assert wide.choices["head"] == ("mean", "0", "1", "2", "3")
    heads = wide.rows[0].values[0][1:]
    assert wide.rows[0].values[0][0] == pytest.approx([sum(column) / 4 for column in zip(*heads, strict=True)])


def test_wide_maps_have_their_largest_weights_named() -> None:
    found = look("ab", stream="attention_residuals", num_hidden_layers=9)
    rows = block(found, Table, "").rows
    assert rows[0][1].text == "embedding 1"
    assert all(row[1].text.count(",") == 2 for row in rows[2:])
    assert len(block(found, Grid, "sources").columns) == 19


def test_two_models_side_by_side() -> None:
    one, other = look(stream="attention_residuals"), look(stream="muddformer", num_hidden_layers=3)
    both = one + other
    assert both.to_dict()["models"] == [only(one), only(other)]
    document = both.document()
    assert document.title == "a <model> (1) and a <model> (2)"
    folders = Inspection(both.prompt, tuple({**m, "model": f"runs/{n}/model"} for n, m in enumerate(both.models)))
    said = [b.text for b in folders.document().blocks if isinstance(b, Prose)]
    assert folders.document().title == "attention_residuals and muddformer"
    assert said[1].startswith("**attention_residuals**: `runs/0/model`; 2 blocks of width")
    grids = [b for b in document.blocks if isinstance(b, Grid)]
    assert [g.name for g in grids] == ["1-sites", "1-sources", "2-sites", "2-sources"]
    assert len({next(iter(g.choices)) for g in grids}) == 1  # one choice of token moves both
    length = block(both, Chart, "depth").panels[0]
    assert [line.label for line in length.marks] == [
        f"a <model> ({n}), {w}" for n in (1, 2) for w in ("read", "increment")
    ]
    assert [(line.colour, line.dashed) for line in length.marks] == [(1, False), (1, True), (2, False), (2, True)]
    assert {line.colour for line in block(both, Chart, "depth").panels[1].marks} == {1, 2}
    pytest.importorskip("matplotlib")
    assert both._repr_html_().count('class="swatch dashed"') == 2  # the increments


def test_a_stream_of_one_s_own_is_shown_with_all_it_tells() -> None:
    layout = Layout.make(2, 8, kinds=[("attention",), ("attention", "mlp")])
    stream = Told(Standard.Config(), layout)
    run = twoaxis.compose(stream, [(site.kind, None, torch.nn.Linear(8, 8)) for site in stream.sites])
    with torch.no_grad(), twoaxis.trace(run) as seen:
        run(torch.randn(1, 5, 8))
    found = Inspection("abcde", (only(look("abcde")) | describe(seen),))
    ratio = seen[1].increment / seen[1].norm  # type: ignore[operator]
    told = {quantity["name"]: quantity for quantity in only(found)["sites"][1]["quantities"]}
    assert list(told) == ["growth", "parts", "cube"]
    assert told["growth"]["mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert told["growth"]["regimes"] == [
        {"name": "small", "range": "up to 1", "share": pytest.approx((ratio < 1).float().mean().item())},
        {"name": "large", "range": "from 1", "share": pytest.approx((ratio >= 1).float().mean().item())},
    ]
    parts = block(found, Grid, "parts")
    assert [(row.label, row.first(2)) for row in parts.rows] == [
        ("0 attention", (0.0, None)),
        ("1 attention", (0.0, 1.0)),
        ("1 mlp", (0.0, 1.0)),
    ]
    words = terminal.render(found.document())
    assert "Regimes of the growth, share of tokens" in words
    assert "cube" not in words.lower()  # three axes are in the data only


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


def test_files_and_a_prompt_that_is_markup(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = look(PROMPT + "<!-- \u2028", stream="attention_residuals", mixer="short_conv")
    saved = found.save(tmp_path, "inspect")
    drawn = {f"inspect-{name}.{form}" for name in ("depth", "sources", "shortconv-taps") for form in ("png", "svg")}
    assert {path.name for path in saved.files} == drawn | {"inspect.md", "inspect.html", "inspect.json"}
    assert json.loads((tmp_path / "inspect.json").read_text()) == json.loads(json.dumps(found.to_dict()))
    text = (tmp_path / "inspect.html").read_text()
    assert '<b id="x">' not in text
    assert "<!--" not in text
    assert text.count("</script>") == 4  # three grids and the page's own


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "two axes"), ("gemma2", "deep_delta"), ("mixtral", "hyper_connections")]
)
def test_grafts_are_inspected_like_decoders(family: str, method: str) -> None:
    """Weights, lengths and mixers of a graft; what it computes is not touched."""
    model = grafted(family, method)
    ids = tokens(1)
    before = logits(model, ids)
    with torch.no_grad(), twoaxis.trace(model) as seen:
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    assert len(seen.passes) == 1
    assert [record.site for record in seen] == list(model.stream.layout.sites)
    text = "".join(map(chr, range(40, 60)))
    found = only(inspect(model, Bytes(), text, name=family))
    assert (found["stream"], found["blocks"]) == (model.config.stream, model.stream.layout.blocks)
    assert all(site["norm"]["mean"] > 0 for site in found["sites"])
    assert any(site["weights"] for site in found["sites"]) == (method != "deep_delta")
    mixed = [site["block"] for site in found["sites"] if any(": " in q["name"] for q in site["quantities"])]
    assert {*mixed} == ({0, 2} if method == "two axes" else set())
