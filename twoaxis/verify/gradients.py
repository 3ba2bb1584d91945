"""Which parameters learn: every row of each gets a gradient somewhere, or the module says that it never can."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

NOISE = 1e-14
"""A gradient below this part of the largest one is rounding, not learning: where terms cancel exactly on paper."""


def row_gradients(module: nn.Module, *calls: Callable[[], Tensor]) -> dict[str, float]:
    """The largest gradient of each row of each parameter over some outputs, by `name[row]`.

    A row is an index of the first dimension; a parameter without dimensions is one row.
    """
    names = [name for name, _ in module.named_parameters()]
    largest = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for draw, call in enumerate(calls):
        out = call()
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(draw), dtype=out.dtype)
        if not names:
            break
        found = torch.autograd.grad(out, list(module.parameters()), probe, allow_unused=True)
        for name, grad in zip(names, found, strict=True):
            if grad is not None:
                largest[name] = torch.maximum(largest[name], grad.abs())
    return {
        f"{name}[{row}]": entries.max().item() if entries.numel() else 0.0
        for name, grad in largest.items()
        for row, entries in enumerate(grad.unsqueeze(0) if grad.dim() == 0 else grad)
    }


def dead_rows(module: nn.Module) -> set[str]:
    """The rows `module.dead()` names; a name without a row is all rows of that parameter."""
    dead = getattr(module, "dead", dict)()
    shapes, rows = {name: p.shape for name, p in module.named_parameters()}, set()
    for name in dead:
        found = re.fullmatch(r"(.+)\[(\d+)\]", name)
        parameter = found.group(1) if found else name
        if parameter not in shapes:
            raise ValueError(f"dead() names {name!r}, the parameters are {', '.join(shapes) or 'none'}")
        count = shapes[parameter][0] if shapes[parameter] else 1
        if found and int(found.group(2)) >= count:
            raise ValueError(f"dead() names {name!r}, {parameter} has {count} rows")
        rows |= {name} if found else {f"{parameter}[{row}]" for row in range(count)}
    return rows


def row_faults(rows: dict[str, float], dead: set[str], *, start: bool = False) -> list[str]:
    """What is wrong with the gradients of `rows`.

    Args:
        rows: largest gradients, from `row_gradients`.
        dead: rows that should have none.
        start: the parameters are initial ones, where a live row may well have no gradient yet.
    """
    finite = [g for g in rows.values() if g < float("inf")]
    floor = NOISE * max(finite, default=0.0)
    faults = [f"{row} gets a gradient that is not finite" for row, g in rows.items() if not g < float("inf")]
    learning = [row for row in sorted(dead) if rows[row] > floor]
    faults += [f"{row} gets a gradient of {rows[row]:.1e} but dead() names it" for row in learning]
    if not start:
        faults += [f"{row} never gets a gradient" for row, g in rows.items() if row not in dead and g <= floor]
    return faults
