"""Hook of mkdocs: a link that leads out of docs/ is shown as the path of the file, which the site does not have."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:examples|twoaxis|benchmarks|tests|[A-Z]+\.md)[^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page without such links; the text of one stays, with the path behind it where it says another thing."""
    return OUTSIDE.sub(lambda m: m[1] if m[2] in m[1] else f"{m[1]} (`{m[2]}`)", markdown)
