"""The inspection as one HTML file that needs nothing else: data, styles and code stand inside it.

The files beside this one are its parts: page.html is the frame, page.css the looks, page.js and charts.js what draws.
The prompt is somebody's text: in the data every `<`, `>` and `&` is escaped, so that nothing in it can end the script
element, and the code puts text into the page as text only. A content security policy forbids everything that is not
in the file.
"""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import Any


def page(document: dict[str, Any]) -> str:
    """The page of a document from `inspect_prompt`."""
    parts = {
        "title": html.escape(f"{document['model'] or 'model'}: {document['stream']}"),
        "style": _part("page.css"),
        "script": _part("page.js") + _part("charts.js"),
        "data": script_data(document),
    }
    # in one go: what a part contains is never looked at again
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def script_data(value: Any) -> str:
    """JSON that may stand inside a script element whatever strings it holds."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return resources.files(__package__ or "twoaxis.inspection").joinpath(name).read_text(encoding="utf-8")
