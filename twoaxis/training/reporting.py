"""Places beside the run's folder that the log is sent to, through transformers' integrations."""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPORTS = ("tensorboard", "trackio", "wandb")
"""Their names; the packages are called the same."""


def check_reports(names: tuple[str, ...]) -> None:
    """Refuse places that nobody knows or whose package is not installed."""
    for name in names:
        if name not in REPORTS:
            close = difflib.get_close_matches(name, REPORTS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown report_to {name!r}{hint}; the log can be sent to {', '.join(REPORTS)}")
        if find_spec(name) is None:
            raise ValueError(f"report_to {name} needs the package {name}, which is not installed: pip install {name}")


def make_reports(names: tuple[str, ...], folder: Path) -> list[Any]:
    """Callbacks for the places that are named. TensorBoard's files stand in the run's folder.

    Args:
        names: of `REPORTS`.
        folder: the run's.
    """
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    made = []
    for kind in get_reporting_integration_callbacks(list(names)):
        callback: Any = kind()
        if kind.__name__ == "TensorBoardCallback" and callback.logging_dir is None:
            callback.logging_dir = str(folder / "tensorboard")
        made.append(callback)
    return made
