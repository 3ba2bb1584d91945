"""The files of an inspection, and the page as a text: escaping, what it holds, what it does not fetch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.inspection.helpers import PROMPT, document
from twoaxis.inspection import files
from twoaxis.inspection.files import prepare_folder, write_files
from twoaxis.inspection.page import page, script_data

PNG = b"\x89PNG\r\n\x1a\n"


class Elements(HTMLParser):
    """Collects the elements of a page, and the text of its data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][1].get("id") == "inspection" and self.open[-1] == "script":
            self.data += data


def parsed(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    elements.close()
    assert elements.open == []
    return elements


def test_the_page_holds_the_document_and_nothing_of_the_prompt_is_markup() -> None:
    made = document(PROMPT + "<!-- <script> {{data}} \u2028", stream="attention_residuals")
    text = page(made)
    elements = parsed(text)
    assert json.loads(elements.data) == made
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert not any(attributes.get("id") == "x" for _, attributes in elements.found)
    assert "b" not in [tag for tag, _ in elements.found]
    assert "<title>a &lt;model&gt;: attention_residuals</title>" in text
    assert "{{title}}" not in text
    assert PROMPT not in text


def test_the_page_needs_nothing_else() -> None:
    text = page(document())
    for tag, attributes in parsed(text).found:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "data:").startswith("data:")
    policy = re.search(r'content="(default-src [^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert "innerHTML" not in text
    assert "fetch(" not in text


def test_data_of_a_script_element() -> None:
    value = {"a": "</script><!--&\u2028\U0001f600"}
    text = script_data(value)
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_data(float("nan"))


@pytest.fixture
def made() -> dict[str, Any]:
    return document("abc", stream="attention_residuals", mixer="short_conv")


def test_files_are_written_whole(tmp_path: Path, made: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    folder = prepare_folder(tmp_path / "new" / "folder")
    written, left_out = write_files(folder, made)
    assert left_out == ""
    assert sorted(p.name for p in written) == sorted(p.name for p in folder.iterdir()) == sorted(files.NAMES)
    for path in written:
        content = path.read_bytes()
        if path.suffix == ".png":
            assert content.startswith(PNG)
            assert len(content) > 5000
        elif path.suffix == ".svg":
            assert b"<svg" in content
    record = json.loads((folder / "inspect.json").read_text())
    assert record == made | {"files": [p.name for p in written]}
    assert (folder / "inspect.html").read_text() == page(made)


def test_an_earlier_inspection_is_replaced_and_other_files_are_left_alone(tmp_path: Path, made: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "notes.txt").write_text("mine")
    write_files(prepare_folder(tmp_path), made)
    plain = document("xy")
    written, _ = write_files(prepare_folder(tmp_path), plain)
    names = {"inspect.html", "inspect.json", "depth.png", "depth.svg"}
    assert {p.name for p in written} == names
    assert {p.name for p in tmp_path.iterdir()} == names | {
        "notes.txt"
    }  # the earlier one's sources and window are gone
    assert json.loads((tmp_path / "inspect.json").read_text())["prompt"] == "xy"
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "record", [None, "{}", "no json", '{"kind": "twoaxis inspection", "files": ["inspect.json"]}', "[]"]
)
def test_foreign_files_of_our_names_are_refused(tmp_path: Path, record: str | None) -> None:
    (tmp_path / "sources.png").write_text("somebody's")
    if record is not None:
        (tmp_path / "inspect.json").write_text(record)
    with pytest.raises(ValueError, match=r"has sources\.png.*no inspection wrote"):
        prepare_folder(tmp_path)
    assert (tmp_path / "sources.png").read_text() == "somebody's"


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        prepare_folder(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        prepare_folder(tmp_path / "file" / "inside")
    if Path("/proc/self").is_dir():  # nobody may write there, not even root
        with pytest.raises(OSError, match="proc"):
            prepare_folder("/proc/self/inspection")
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "inspect.html").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"inspect\.html, which no inspection wrote"):
        prepare_folder(tmp_path / "dangling")


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(to: Path) -> None:
        to.write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        files._write(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


def test_without_matplotlib_the_page_is_written_and_the_rest_is_named(tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text(json.dumps(document("abc")))
    code = f"""
import json, sys
from pathlib import Path
sys.modules["matplotlib"] = None
from twoaxis.inspection.files import prepare_folder, write_files
folder = prepare_folder({str(tmp_path / "out")!r})
written, left_out = write_files(folder, json.loads(Path({str(tmp_path / "made.json")!r}).read_text()))
print(sorted(p.name for p in written), left_out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "['inspect.html', 'inspect.json'] no figures: matplotlib is not installed" in done.stdout


def test_figures_draw_the_numbers_of_the_document() -> None:
    pytest.importorskip("matplotlib")
    from twoaxis.inspection.plots import _root, _square, figures

    def points(line: Any) -> list[float]:
        return line.get_ydata().tolist() if hasattr(line.get_ydata(), "tolist") else list(line.get_ydata())

    made: dict[str, Any] = document("abcd", stream="deep_delta", mixer="canon", mixer_options={"set": "B"})
    made["model"] = "a$b_{c$"
    drawn = figures(made)
    assert list(drawn) == ["depth", "window"]
    panels = {axes.get_title(loc="left"): axes for axes in drawn["depth"].axes}
    assert list(panels) == ["Length", "Cosine of read and increment", "Gate", "Discrepancy"]
    read, increment = panels["Length"].get_lines()
    assert points(read) == [site["norm"]["mean"] for site in made["sites"]]
    assert points(increment) == [site["increment"]["mean"] for site in made["sites"][:-1]]
    assert [line.get_label() for line in panels["Discrepancy"].get_lines()] == ["before the write", "after the write"]
    gates = [next(p for p in site["probes"] if p["name"] == "gate")["mean"] for site in made["sites"][:-1]]
    assert points(panels["Gate"].get_lines()[0]) == gates
    assert [tick.get_text() for tick in panels["Discrepancy"].get_xticklabels()] == ["0", "1", "out"]
    image = drawn["window"].axes[0].images[0].get_array()
    assert image is not None
    taps = [inner["probes"][0]["mean"] for site in made["sites"] for inner in site["inner"]]
    assert image.tolist() == taps
    mixed = document("ab", stream="hyper_connections")
    axes = figures(mixed)["sources"].axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == mixed["columns"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [site["label"] for site in mixed["sites"]]
    for value in (-4.0, 0.0, 0.25):
        assert _square(_root(value)) == value
