"""Every command and snippet in README.md and docs/ runs, the two set-up commands apart."""

from __future__ import annotations

import inspect
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

import twoaxis
from benchmarks.scale import CONTENDERS
from docs._make import demo, reference
from docs._make.fill import DOCS
from tests.support.commands import registries_restored, run_line
from tests.support.measured import measured_once  # noqa: F401
from tests.support.processes import ROOT
from twoaxis import cli
from twoaxis.base.machine import install
from twoaxis.guide import map as methods_map
from twoaxis.show.document import slug

TUTORIAL = ROOT / "docs" / "tutorial" / "index.md"  # run by test_tutorial.py, in its order
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if page != TUTORIAL]
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


@pytest.mark.parametrize("page", [p for p in RUN if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_of_a_page_run_in_order(page: Path) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    with registries_restored():
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), names)


COMMANDS = sorted({command for page in RUN for command in commands(page)})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str) -> None:
    if command in ELSEWHERE:
        assert f'run_line("{command}"' in (ROOT / "tests" / ELSEWHERE[command]).read_text()
        return
    done = run_line(command)
    assert done.code == 0, done.out + done.err
    assert done.out.strip()


def test_options_that_pages_name_exist() -> None:
    """Also of commands that take too long to run here, in code or within a sentence."""
    of_all = {"--help", "--json", "--markdown", "--use"}
    known = {
        name: {*of_all, *re.findall(r"--[a-z][\w-]*", run_line(f"twoaxis {name} --help").out)} for name in cli.COMMANDS
    }
    line = re.compile(rf"\btwoaxis ({'|'.join(cli.COMMANDS)})\b((?:\\\n|[^\n`])*)")
    named = [(page, *found) for page in PAGES for found in line.findall(page.read_text())]
    assert len(named) > 100
    for page, command, rest in named:
        assert {*re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)} <= known[command], (page.name, command, rest)


def test_no_other_fences_hide_code() -> None:
    for page in PAGES:
        fences = set(re.findall(r"^```(\w+)", page.read_text(), flags=re.MULTILINE))
        assert fences <= {"python", "sh", "text"}, (page.name, fences)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target, part in re.findall(r"\[[^\]\n]+\]\(([\w./-]+\.\w+)?(?:#([\w-]+))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), (page.name, target)
            if part:
                headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
                assert part in map(slug, headings), (page.name, f"{target}#{part}")


def test_the_public_names() -> None:
    for name in twoaxis._HOMES:
        said = inspect.getdoc(getattr(twoaxis, name)) or ""
        assert len(said) > 20, name
        assert "the module's docstring" not in said, f"help(twoaxis.{name}) does not show that one"
    with pytest.raises(AttributeError, match="no attribute 'streem'"):
        twoaxis.streem  # noqa: B018


RIDDLES = ("as one reads it", "without numbers", "how-manieth", "taken up", "dearer", "told", "books", "one's own")
RIDDLES += ("room for",)
"""Phrases that make a reader guess; plain words of the field say the same."""


def test_no_riddles() -> None:
    banned = re.compile(rf"\b({'|'.join(RIDDLES)})\b", re.IGNORECASE)
    found = [f"{page.name}: {hit[0]}" for page in PAGES for hit in banned.finditer(page.read_text())]
    for path in sorted((ROOT / "twoaxis").rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                found += [
                    f"{path.relative_to(ROOT)}:{token.start[0]}: {hit[0]}" for hit in banned.finditer(token.string)
                ]
    assert found == []


def test_pages_open_with_their_reader() -> None:
    for page in PAGES[1:]:
        opening = page.read_text().split("\n\n")[1]
        assert re.match(r"For .*\bAfterwards ", opening, flags=re.DOTALL), (page.name, opening[:60])


COLUMNS, LETTERS = 6, 100
"""What a table may have at most: columns, and letters of a row as it is read, links and marks taken off."""


def too_wide(text: str) -> list[str]:
    """Rows of tables, code apart, that a page cannot show side by side."""
    found = []
    for line in re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if not line.lstrip().startswith("|") or re.fullmatch(r"[|:\- ]*-[|:\- ]*", line):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        read = " | ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*\\]", r"\1", cell) for cell in cells)
        if len(cells) > COLUMNS or len(read) > LETTERS:
            found.append(line)
    return found


def test_tables_fit_a_page() -> None:
    fits, wide, many = f"| {'a' * 48} | `{'b' * 49}` |", f"| {'a' * 48} | {'b' * 50} |", "| | | | | | | |"
    hidden = f"```text\n{wide}\n```\n| [{'a' * 90}](docs/{'b' * 90}.md) |\n"
    assert too_wide(f"{fits}\n|---|---|\n  {fits}\n{hidden}") == []
    assert too_wide(f"{wide}\n|---|---|\n  {wide}\n{many}\n") == [wide, f"  {wide}", many]
    for page in PAGES:
        assert too_wide(page.read_text()) == [], page.relative_to(ROOT)


def test_what_is_made_of_the_code_is_current() -> None:
    for name, text in reference.pages().items():
        assert (DOCS / name).read_text() == text, f"{name}: run make docs"
    assert (DOCS / "llms.txt").read_text() == reference.llms(), "run make docs"


def test_the_readme_says_what_is_counted_and_drawn() -> None:
    """Parameters of its table are the map's, its figure is drawn from its table."""
    readme = (ROOT / "README.md").read_text()
    assert [name for name in (*twoaxis.stream_names(), *twoaxis.mixer_names()) if f"`{name}`" not in readme] == []
    said = dict(re.findall(r"^\|[^|]+\| `(\w+)` \|[^|]+\| ([\d.]+%?) \|", readme, flags=re.MULTILINE))
    for row in methods_map.entries(methods_map.make_shape()):
        share = 100 * row.row()["parameters_share"]
        digits = len(said[row.name].rstrip("%").partition(".")[2])
        assert said[row.name].rstrip("%") == f"{share:.{digits}f}", row.name
    measured = (DOCS / "results" / "performance.md").read_text().partition("## Training step against")[2]
    steps = dict(
        re.findall(r"^\| ([^|]+) \| ([\d.]+) ±", measured.partition("## Training step of a small")[0], re.MULTILINE)
    )
    listed = dict(re.findall(r"^\|[^|]+\| `(\w+)` \|.*\| ([\d.]+) \|$", readme, flags=re.MULTILINE))
    for contender, made_of in CONTENDERS.items():
        name = made_of.get("mixer", made_of.get("stream", "standard"))
        if not made_of.get("stream_options") and made_of.get("mixer_options", {"window": 16}) == {"window": 16}:
            assert listed.pop(name) == f"{float(steps[contender]):.2f}", contender
    assert set(listed) == {"deep_cross_attention"}  # measured with a window alone
    streams, mixers = len(twoaxis.stream_names()), len(twoaxis.mixer_names())
    assert f"{streams} residual streams, {mixers} local mixers" in readme
    assert len(demo.ROW.findall(readme)) >= 4
    for name, text in demo.figures(readme).items():
        assert (DOCS / "results" / "figures" / name).read_text() == text, "run make docs"


def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"`((?:twoaxis|tests|docs|examples|benchmarks)/[\w./]+\.\w+)", page.read_text()):
            assert "NAME" in path or (ROOT / path).exists(), (page.name, path)


def test_the_site_has_every_page_and_the_house_every_room() -> None:
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES[1:]}
    tree = (DOCS / "explanation" / "house.md").read_text().partition("    twoaxis/\n")[2].partition("\n\n")[0]
    rooms = [path.name + "/" * path.is_dir() for path in (ROOT / "twoaxis").iterdir() if path.name[:1] not in "_."]
    assert sorted(re.findall(r"^      (\w\S*)", tree, flags=re.MULTILINE)) == sorted({*rooms} - {"py.typed"})


def test_one_line_of_installation() -> None:
    """The README and every message name the same command, for extras that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in [*PAGES, *sorted((ROOT / "twoaxis").rglob("*.py"))]:
        for line in re.findall(r"pip install .*", path.read_text()):
            if path.name in ("machine.py", "folder.py"):  # the line itself; a logger that is no extra of ours
                continue
            assert 'pip install -e ".[' in line, (path.name, line)
    for extra in ("lab", "gguf", "ray", "slurm"):
        assert extra in extras
        assert install(extra).startswith(f'pip install -e ".[{extra}]"')
    assert 'pip install -e ".[lab]"' in PAGES[0].read_text()
