"""Execute examples/tour.ipynb and keep its outputs: `python -m docs._make.notebook` (extra `docs`)."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

PATH = Path(__file__).parents[2] / "examples" / "tour.ipynb"

if __name__ == "__main__":
    notebook = nbformat.read(PATH, as_version=4)
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    for cell in notebook.cells:
        if "outputs" in cell:  # what is said on stderr is progress
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            cell.metadata.pop("execution", None)
    nbformat.write(notebook, PATH)
