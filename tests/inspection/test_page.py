"""The page in a real browser: it draws, it answers to the mouse, it says nothing on the console."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.inspection.helpers import PROMPT, document
from twoaxis.inspection.page import page

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not installed"),
]

WATCH = """<script>
const complaints = [];
for (const kind of ["error", "securitypolicyviolation", "unhandledrejection"]) {
  addEventListener(kind, (event) => complaints.push(`${kind}: ${event.message || event.blockedURI || event.reason}`));
}
for (const kind of ["error", "warn"]) console[kind] = (...words) => complaints.push(words.join(" "));
</script>"""

HELP = """
const all = (selector) => [...document.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
function over(node) {
  const box = node.getBoundingClientRect();
  const place = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true };
  node.dispatchEvent(new MouseEvent("mouseenter", place));
  node.dispatchEvent(new MouseEvent("mousemove", place));
  return one("#tooltip").hidden ? null : one("#tooltip").textContent;
}
const press = (node) => node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const cell = (site, column) => one(`#map .cell[data-site="${site}"][data-column="${column}"]`);
const told = (name) => { const found = one(`#details [data-name="${name}"]`); return found && found.textContent; };
const titles = () => all(".chart").map((card) => card.dataset.title);
"""


def look(made: dict[str, Any], script: str, tmp_path: Path, size: str = "1400,900") -> dict[str, Any]:
    """Open the page of a document, run a script that fills `found`, and return that with what the browser says."""
    ending = (
        "<script>" + HELP + "const found = {};\ntry {" + script + "} catch (error) { complaints.push(error.stack); }"
    )
    ending += "\nfound.complaints = complaints; document.body.append(Object.assign(document.createElement('pre'),"
    ending += " { id: 'found', textContent: JSON.stringify(found) }));</script></body>"
    text = page(made).replace("<head>", "<head>" + WATCH, 1)
    head, _, tail = text.rpartition("</body>")
    path = tmp_path / "page.html"
    path.write_text(head + ending + tail, encoding="utf-8")
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={size}",
            "--virtual-time-budget=4000",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert told is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(told[1]))


def shown(value: float) -> str:
    return f"{value:.4f}"


def test_hover_site_and_token_show_the_numbers_of_the_document(tmp_path: Path) -> None:
    made = document(stream="attention_residuals")
    found = look(
        made,
        """
found.title = one("#title").textContent; found.stream = one("#stream").textContent;
found.cells = all("#map .cell").length; found.titles = titles();
found.tokens = all("#tokens .token").map((chip) => chip.textContent);
found.markup = one("#tokens b, #x, #tokens script") !== null;
found.hover = over(cell(3, 1));
press(cell(3, 1)); found.norm = told("length of the read"); found.effective = told("effective sources");
found.bars = all("#details .bar .value").map((bar) => bar.textContent);
found.chosen = one("#map .chosen").textContent;
press(one('.token[data-position="4"]'));
found.token = told("length of the read"); found.tokenHover = over(cell(3, 1));
found.pressed = all('.token[aria-pressed="true"]').map((chip) => chip.dataset.position);
found.faint = all(".chart .faint").length;
one("#site").value = "4"; one("#site").dispatchEvent(new Event("change"));
found.out = told("length of the read"); found.noIncrement = told("length of the increment");
press(one("#previous")); press(one("#previous")); found.moved = one("#site").value;
press(one(".token.all")); found.average = told("length of the read");
press(one('#map .name[data-site="0"]')); found.first = one("#site").value;
one("#colours").value = "row"; one("#colours").dispatchEvent(new Event("change"));
found.legend = one("#legend").textContent;
found.chartHover = over(one('.chart[data-title="Cosine of read and increment"] .hit'));
""",
        tmp_path,
    )
    sites = made["sites"]
    assert found["complaints"] == []
    assert found["title"] == "a <model>"
    assert found["stream"] == "attention_residuals"
    assert found["cells"] == 1 + 2 + 3 + 4 + 5
    assert found["titles"] == ["Length along depth", "Cosine of read and increment", "Effective sources"]
    raw = PROMPT.encode()
    assert found["tokens"][0] == "average"
    assert found["tokens"][3:6] == ["\\xc3", "\\xbc", "\\xc3"]
    assert "".join(found["tokens"][8:]) == raw[7:].decode().replace(" ", "·").replace("\n", "↵")
    assert found["markup"] is False
    weight = sites[3]["weights"]["mean"][0][1]
    assert found["hover"] == f"block 1, mlp read {shown(weight)} of sub-layer 0\naverage over tokens"
    assert found["norm"] == shown(sites[3]["norm"]["mean"])
    assert found["effective"] == shown(sites[3]["effective"]["mean"])
    assert found["bars"] == [shown(w) for w in sites[3]["weights"]["mean"][0]]
    assert found["chosen"] == "1 mlp"
    assert found["token"] == shown(sites[3]["norm"]["tokens"][4])
    assert found["token"] != found["norm"]
    assert f"read {shown(sites[3]['weights']['tokens'][4][0][1])} of sub-layer 0\ntoken 4, " in found["tokenHover"]
    assert found["pressed"] == ["4"]
    assert found["faint"] == 4
    assert found["out"] == shown(sites[4]["norm"]["tokens"][4])
    assert found["noIncrement"] is None
    assert found["moved"] == "2"
    assert found["average"] == shown(sites[2]["norm"]["mean"])
    assert found["first"] == "0"
    assert "largest of the row" in found["legend"]
    assert found["chartHover"].startswith("block 1, attention\ncosine ")
    assert shown(sites[2]["cosine"]["mean"]) in found["chartHover"]


def test_probes_regimes_mixers_ways_and_both_themes(tmp_path: Path) -> None:
    swa = {"mixer": "short_swa", "mixer_options": {"window": 3, "start": "normal"}}
    read = "found.titles = titles(); found.heads = all('#details h3').map((h) => h.textContent);"
    delta = document(stream="deep_delta", **swa)
    found = look(
        delta,
        read
        + """
found.hint = one("#map-hint").textContent; found.map = one("#map").hidden; found.gate = told("gate");
found.regime = over(one('.chart[data-title="Regimes of the gate"] .hit'));
found.attention = over(one('.chart[data-title="ShortSWA: attention by distance"] .cell'));
const tone = () => getComputedStyle(document.body).backgroundColor;
found.before = tone(); press(one("#theme")); found.after = tone(); press(one("#theme")); found.again = tone();
""",
        tmp_path,
    )
    assert found["complaints"] == []
    assert found["titles"] == [
        "Length along depth",
        "Cosine of read and increment",
        "Gate",
        "Discrepancy",
        "Regimes of the gate",
        "ShortSWA: attention by distance",
    ]
    assert found["heads"] == ["ShortSWA: attention"]
    assert found["map"] is True
    assert "no weights over sources" in found["hint"]
    gate = next(p for p in delta["sites"][0]["probes"] if p["name"] == "gate")
    assert found["gate"] == shown(gate["mean"])
    middle = next(p for p in delta["sites"][3]["probes"] if p["name"] == "gate")
    told = [f"{r['name']} {r['share'] * 100:.1f}%" for r in middle["regimes"]]
    assert found["regime"].split("\n")[1:5] == told
    heads = [head[0] for head in delta["sites"][0]["inner"][0]["probes"][0]["mean"]]
    assert f"distance 0: {shown(sum(heads) / len(heads))}" in found["attention"]
    assert found["before"] == found["again"] != found["after"]

    mixed = document(stream="manifold_hyper_connections", blend=True)
    found = look(mixed, read + 'found.mix = over(all("#details svg")[1].querySelectorAll(".cell")[1]);', tmp_path)
    assert found["complaints"] == []
    assert found["titles"][3:] == ["Blend gate", "Distance from doubly stochastic"]
    assert found["heads"] == ["Read from", "write", "mix"]
    mix = next(p for p in mixed["sites"][0]["probes"] if p["name"] == "mix")
    assert found["mix"] == f"to 0, from 1: {shown(mix['mean'][0][1])}"

    ways = document(stream="muddformer", num_hidden_layers=3)
    script = """
found.before = over(cell(2, 0));
one("#ways").value = "1"; one("#ways").dispatchEvent(new Event("change"));
found.hover = over(cell(2, 0)); found.out = over(cell(6, 0)); found.options = one("#ways").options.length;
"""
    found = look(ways, script, tmp_path)
    assert found["complaints"] == []
    weights = ways["sites"][2]["weights"]["mean"]
    assert found["options"] == 1 + len(weights) == 5
    assert f"read {shown(sum(way[0] for way in weights) / 4)} of embedding" in found["before"]
    assert f"read {shown(weights[1][0])} of embedding" in found["hover"]
    assert "out, the head's read has no way 1" in found["out"]


def test_sixty_sites_are_legible_and_numbers_that_are_none_do_not_stop_it(tmp_path: Path) -> None:
    made = document("ab", stream="attention_residuals", num_hidden_layers=30)
    made["sites"][5]["norm"]["mean"] = None
    made["sites"][5]["weights"]["mean"][0][0] = None
    script = """
const boxes = (selector) => all(selector).map((node) => node.getBoundingClientRect());
const apart = (found, low, high) => found.slice(1).every((box, i) => box[low] >= found[i][high] - 3.5);
found.rows = boxes("#map .name").length; found.rowsApart = apart(boxes("#map .name"), "top", "bottom");
const ticks = all(".chart:first-child svg text").filter((node) => node.getAttribute("text-anchor") === "middle");
found.ticks = ticks.map((node) => node.textContent);
found.ticksApart = apart(ticks.slice(0, -1).map((node) => node.getBoundingClientRect()), "left", "right");
const labels = boxes("#map .column");
found.columns = labels.length; found.columnsApart = apart(labels, "left", "right");
found.inside = labels.every((box) => box.top >= one("#map svg").getBoundingClientRect().top - 1);
found.none = over(cell(5, 0));
found.wide = document.documentElement.scrollWidth <= innerWidth;
"""
    for size in ("1400,900", "800,900"):
        found = look(made, script, tmp_path, size)
        assert found["complaints"] == []
        assert found["rows"] == 61
        assert found["rowsApart"]
        assert found["ticks"][0] == "0"
        assert found["ticks"][-2:] == ["out", "block"]
        assert found["ticksApart"]
        assert found["columns"] >= 30
        assert found["columnsApart"]
        assert found["inside"]
        assert "not a number" in found["none"]
        assert found["wide"]
