"""The parts of docs/cost.md that this library writes itself: what commands print, and published figures beside ours.

    python -m twoaxis.guide.cost_page docs/cost.md       writes them anew between their marks

A mark is a comment that names its part: `<!-- begin: published -->` and `<!-- end: published -->`; a command's part is
named by the command.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

MARK = re.compile(r"<!-- begin: (?P<part>.+?) -->\n(?P<text>.*?)<!-- end: (?P=part) -->", re.DOTALL)


@cache
def part(name: str) -> str:
    """The text between a part's marks."""
    if name == "published":
        from twoaxis.guide.published import compared, published_table
        from twoaxis.show import markdown
        from twoaxis.show.document import Document

        return markdown.render(Document("", (published_table(compared()),)))
    words = shlex.split(name)
    if words[:2] != ["twoaxis", "cost"]:
        raise ValueError(f"a part of this page is `published` or what a twoaxis cost command prints, got {name!r}")
    wide = os.environ | {"COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, env=wide)
    if done.returncode:
        raise ValueError(f"{name} failed: {done.stderr.strip()}")
    return f"```sh\n{name}\n```\n\n```text\n{done.stdout.strip()}\n```\n"


def parts(text: str) -> dict[str, str]:
    """What stands between the marks of a page, by part."""
    return {found["part"]: found["text"] for found in MARK.finditer(text)}


def write_page(path: Path) -> None:
    """Write every part of a page anew."""
    from twoaxis.base.files import write_text

    text = path.read_text()
    if not MARK.search(text):
        raise ValueError(f"{path} has no parts: put <!-- begin: published --> and <!-- end: published --> on lines")
    made = MARK.sub(lambda m: f"<!-- begin: {m['part']} -->\n{part(m['part'])}<!-- end: {m['part']} -->", text)
    write_text(path, made)


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
