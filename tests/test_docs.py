"""Every command and snippet in README.md and docs/ runs, the two set-up commands apart."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SET_UP = {"make demo", "make test"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    lines = [line.partition("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line and line not in SET_UP]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_snippets_of_a_page_run_in_order(page: Path) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("command", sorted({c for p in PAGES for c in commands(p)}))
def test_commands_run(command: str) -> None:
    words = shlex.split(command)
    assert words[0] in ("twoaxis", "python", "pytest"), f"{command!r}: no known way to run it in a test"
    arguments = {"twoaxis": ["-m", "twoaxis"], "python": [], "pytest": ["-m", "pytest", "-q"]}[words[0]]
    done = subprocess.run(
        [sys.executable, *arguments, *words[1:]],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_no_other_fences_hide_code() -> None:
    for page in PAGES:
        fences = set(re.findall(r"^```(\w+)", page.read_text(), flags=re.MULTILINE))
        assert fences <= {"python", "sh", "text"}, (page.name, fences)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\[[^\]\n]+\]\(([\w./-]+\.\w+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_readme_names_every_method() -> None:
    import twoaxis

    text = (ROOT / "README.md").read_text()
    for name in (*twoaxis.stream_names(), *twoaxis.mixer_names()):
        assert f"`{name}`" in text, name


def test_the_public_names() -> None:
    import twoaxis

    for name in twoaxis._HOMES:
        assert getattr(twoaxis, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'streem'"):
        twoaxis.streem  # noqa: B018
