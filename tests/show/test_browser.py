"""The page in a real browser: nothing on the console, nothing wider than the window, and what the script does."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.show.samples import CONTENDERS, everything
from twoaxis.show import page

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not installed"),
]

WATCH = """
const complaints = [];
for (const kind of ["error", "securitypolicyviolation", "unhandledrejection"]) {
  addEventListener(kind, (event) => complaints.push(`${kind}: ${event.message || event.blockedURI || event.reason}`));
}
for (const kind of ["error", "warn", "log"]) console[kind] = (...words) => complaints.push(words.join(" "));
"""
SCRIPT = """
const all = (selector) => [...document.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const seen = (node) => node.getBoundingClientRect().width > 0;
const found = {};
try {
  found.wide = document.documentElement.scrollWidth - innerWidth;
  found.paper = getComputedStyle(document.body).backgroundColor;
  found.line = getComputedStyle(one("#chart-curves [data-series='1'] path[style*='stroke: var']")).stroke;
  found.figures = all("#chart-curves figure").filter(seen).map((figure) => figure.textContent.trim().split("\\n")[0]);
  const select = one("#chart-curves select[name=show]");
  select.value = "difference"; select.dispatchEvent(new Event("change"));
  found.chosen = all("#chart-curves figure").filter(seen).length;
  const line = all("#chart-curves figure").filter(seen)[0].querySelector("[data-series='1']");
  found.before = seen(line);
  all("#chart-curves .legend input")[1].click();
  found.after = seen(line);
  const heads = all("table")[0].tHead.rows[0].cells;
  const names = () => [...all("table")[0].tBodies[0].rows].map((row) => row.cells[0].textContent);
  heads[2].querySelector("button").click(); found.ascending = names();
  heads[2].querySelector("button").click(); found.descending = names();
  heads[3].querySelector("button").click(); found.missing = names().at(-1);
  found.sort = heads[3].ariaSort;
  found.sections = (all("table")[1].tHead.rows[0].cells[1].querySelector("button").click(),
    [...all("table")[1].tBodies].map((body) => body.rows[0].textContent));
  const map = (row, column) => one("#grid-reads table").rows[row + 1].cells[column + 1];
  const gate = (row, column) => one("#grid-gates table").rows[row + 1].cells[column + 1];
  const part = (cell) => cell.style.getPropertyValue("--part");
  found.heads = [...one("#grid-reads table").rows[0].cells].map((cell) => cell.textContent).slice(0, 3);
  found.cells = [map(0, 2), map(0, 3), map(1, 19), gate(0, 0), gate(0, 1), gate(1, 1)].map((cell) => cell.textContent);
  found.parts = [map(1, 19), map(0, 2), gate(0, 1), gate(1, 0)].map(part);
  found.classes = [gate(0, 1), map(0, 3), map(1, 1)].map((cell) => cell.className);
  found.seen = getComputedStyle(map(1, 19)).backgroundColor;
  const pick = (grid, name, value) => {
    const select = [...one(grid).querySelectorAll("select")].find((found) => found.name === name);
    select.value = value; select.dispatchEvent(new Event("change"));
  };
  pick("#grid-gates", "token", "2"); pick("#grid-reads", "way", "1");
  found.moved = [map(0, 2), gate(0, 0), gate(1, 0)].map((cell) => cell.textContent);
  found.linked = one("#grid-reads select").value;
  pick("#grid-reads", "colours by", "1"); found.byRow = part(map(0, 2));
  found.title = map(1, 4).title;
  one("#theme").click(); found.other = getComputedStyle(document.body).backgroundColor;
} catch (error) { complaints.push(error.stack); }
found.complaints = complaints;
document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) }));
"""


def look(folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """Open the page of every kind of block, let the script above use it, and return what it found."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (WATCH, SCRIPT)]
    text = page.render(everything())
    text = text.replace("script-src ", "script-src " + "".join(f"'sha256-{digest}' " for digest in digests), 1)
    text = text.replace("<title>", f"<script>{WATCH}</script><title>", 1)
    text = text.replace("</body>", f"<script>{SCRIPT}</script></body>", 1)
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=4000"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=False, timeout=120
    )
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert told is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(told[1]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 500])
def test_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    found = look(tmp_path, width, dark)
    light, night = "rgb(255, 255, 255)", "rgb(20, 24, 31)"
    assert found["complaints"] == []
    assert found["wide"] <= 0
    assert (found["paper"], found["other"]) == ((night, light) if dark else (light, night))
    assert found["line"] == ("rgb(91, 176, 240)" if dark else "rgb(0, 103, 168)")
    assert len(found["figures"]) == 1
    assert found["figures"][0].startswith("loss against tokens")
    assert (found["chosen"], found["before"], found["after"]) == (1, True, False)
    assert found["ascending"] == list(CONTENDERS[::-1])
    assert found["descending"] == list(CONTENDERS)
    assert found["missing"] == "standard"
    assert found["sort"] == "ascending"
    assert found["sections"] == ["depth axis", "sequence axis"]
    assert found["heads"] == ["site", "source 0", "source 1"]
    assert found["cells"] == ["0.1", "-", "0.95", "1", "-100", "-"]
    assert found["parts"] == ["100.0%", "32.4%", "100.0%", "50.0%"]
    assert found["classes"] == ["cold", "none", ""]
    assert found["seen"] == ("color(srgb 0.54902 0.772549 1)" if dark else "color(srgb 0.0392157 0.290196 0.560784)")
    assert found["moved"] == ["3.1", "2", "0.25"]  # token 1, way 0; a row of one entry is the same for every token
    assert found["linked"] == "2"
    assert found["byRow"] == "100.0%"
    assert found["title"] == "site 20, source 4: 3.2"
