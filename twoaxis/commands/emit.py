"""How a command ends: its result printed in one of its forms, and its exit code."""

from __future__ import annotations

import io
import json
import sys
from typing import Literal

from twoaxis.show.document import Showable


def emit(result: Showable, form: Literal["text", "json", "markdown"] = "text") -> int:
    """Print a result and return what the command ends with."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a narrow encoding must not end a command
    if form == "json":
        print(json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))
    elif form == "markdown":
        from twoaxis.show import markdown

        print(markdown.render(result.document()), end="")
    else:
        result.show()
    return result.exit_code
