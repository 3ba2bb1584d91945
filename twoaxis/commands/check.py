"""The command that holds somebody's own methods to the contract: check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from twoaxis.verify.report import Checked


def check(
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    *,
    compiled: Annotated[bool, tyro.conf.arg(name="compile")] = True,
    seed: int = 0,
) -> Checked:
    """Run the conformance kit on every stream and mixer that a Python file defines; exit with 1 if a check fails.

    Args:
        path: The file. It is imported: check your own files only.
        compiled: Also compile with fullgraph=True and compare; --no-compile leaves it out and is much quicker.
        seed: Seed of the random instances.
    """
    import torch

    from twoaxis.verify.load import check_file
    from twoaxis.verify.report import Checked

    torch.set_num_threads(1)  # the instances are small
    return Checked(seed, tuple(check_file(path, compile=compiled, seed=seed)))
