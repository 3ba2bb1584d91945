"""Every command and snippet in README.md and docs/ runs, the two set-up commands apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import run_line
from tests.support.processes import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SET_UP = {"make demo", "make test"}
ELSEWHERE = {
    "python -m benchmarks --quick": "test_benchmarks.py",
    "twoaxis check examples/my_stream.py": "test_write_your_own.py",
    "twoaxis verify": "verify/test_claims.py",
    "twoaxis verify --only duality --json": "commands/test_cli.py",
}
"""Commands that take long: the file that runs each of them once and looks at what it says."""


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


COMMANDS = sorted({command for page in PAGES for command in commands(page)})


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ELSEWHERE])
def test_commands_run(command: str) -> None:
    done = run_line(command)
    assert done.code == 0, done.out + done.err
    assert done.out.strip()


def test_the_other_commands_run_elsewhere() -> None:
    for command, file in ELSEWHERE.items():
        assert command in COMMANDS
        assert f'run_line("{command}"' in (ROOT / "tests" / file).read_text(), command


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
