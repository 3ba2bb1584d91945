"""A saved folder that loads by itself: `trust_remote_code=True` works where twoaxis is installed but not imported.

The folder's own code is one import of this package; nothing else is executed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

MODULE = "modeling_twoaxis"
CODE = '''"""Loads this folder with the installed twoaxis package."""

from twoaxis.model.graft import TwoAxisConfig, TwoAxisForCausalLM, TwoAxisModel

__all__ = ["TwoAxisConfig", "TwoAxisForCausalLM", "TwoAxisModel"]
'''
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.TwoAxisConfig",
    "AutoModel": f"{MODULE}.TwoAxisModel",
    "AutoModelForCausalLM": f"{MODULE}.TwoAxisForCausalLM",
}


def write_loader(folder: str | os.PathLike[str]) -> None:
    """Add the module and the configuration's `auto_map` to a folder saved by `save_pretrained`."""
    path = Path(folder)
    write_atomically(path / f"{MODULE}.py", CODE)
    config = path / "config.json"
    document = json.loads(config.read_text())
    document["auto_map"] = AUTO_MAP
    write_atomically(config, json.dumps(document, indent=2, sort_keys=True) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)
