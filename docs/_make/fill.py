"""The parts of documentation pages that the library writes itself.

    python -m docs._make          writes every part of every page anew, as `make docs` does

A part stands between two comments that name it, `<!-- begin: published -->` and `<!-- end: published -->`:

    published           published figures beside ours
    two_axes NAME       numbers of docs/results/figures/two_axes.json, see `two_axes_page`
    original NAME       names or settings of other people's checkpoints, see `originals_page`
    twoaxis cost ...    what a command prints

The pages of `reference`, llms.txt and all figures, the README's too, are written as a whole.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGES = ("howto/cost.md", "howto/foreign_checkpoints.md", "explanation/two_axes.md")
"""Pages with parts."""
MARK = re.compile(r"<!-- begin: (?P<part>.+?) -->\n(?P<text>.*?)<!-- end: (?P=part) -->", re.DOTALL)


@cache
def part(name: str) -> str:
    """The text between a part's marks."""
    if name == "published":
        from twoaxis.guide.published import Published
        from twoaxis.show import markdown

        return markdown.render(Published.of().document())
    if name.startswith("two_axes "):
        from docs._make.two_axes_page import stored, text

        return text(name.removeprefix("two_axes "), stored())
    if name.startswith("original "):
        from docs._make.originals_page import TABLES

        return TABLES[name.removeprefix("original ")]()
    words = shlex.split(name)
    if words[:2] != ["twoaxis", "cost"]:
        raise ValueError(
            f"a part of a page is published, two_axes NAME, original NAME or a twoaxis cost command, got {name!r}"
        )
    wide = os.environ | {"COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, env=wide)
    if done.returncode:
        raise ValueError(f"{name} failed: {done.stderr.strip()}")
    return f"```sh\n{name}\n```\n\n```text\n{done.stdout.strip()}\n```\n"


def parts(text: str) -> dict[str, str]:
    """What stands between the marks of a page, by part."""
    return {found["part"]: found["text"] for found in MARK.finditer(text)}


def filled(text: str) -> str:
    """A page with every part made anew."""
    return MARK.sub(lambda m: f"<!-- begin: {m['part']} -->\n{part(m['part'])}<!-- end: {m['part']} -->", text)


def write() -> list[Path]:
    """Write every page and figure; returns where they are."""
    from docs._make import demo, reference
    from docs._make.two_axes_page import figures, stored
    from twoaxis.base.files import write_text

    drawn = figures(stored()) | demo.figures(demo.README.read_text(encoding="utf-8"))
    made = {f"results/figures/{name}": text for name, text in drawn.items()}
    made |= {name: filled((DOCS / name).read_text(encoding="utf-8")) for name in PAGES}
    made |= reference.pages()
    for name, text in made.items():
        write_text(DOCS / name, text)
    write_text(DOCS / "llms.txt", reference.llms())  # of the pages as they are now
    return [DOCS / name for name in (*made, "llms.txt")]
