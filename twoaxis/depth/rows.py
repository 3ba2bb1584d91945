"""Parameters stacked by site, taken apart once per pass.

A method keeps one tensor per kind of parameter with a row per site. Indexed at every site, each site's backward would
fill and add a gradient of the whole stack: work that grows with the square of the depth. `Rows` takes the stacks apart
when a pass begins, so that autograd puts the rows' gradients together once; it travels with the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rows(NamedTuple):
    """The rows of a module's stacked tensors.

    Attributes:
        names: of the stacks, whether the module has them or not.
        stacks: those it has, by name.
        rows: their rows, by name; views, so that they show what is written into the stacks later.
        tracked: whether gradients were recorded when they were taken apart.
    """

    names: tuple[str, ...]
    stacks: dict[str, Tensor]
    rows: dict[str, tuple[Tensor, ...]]
    tracked: bool

    @staticmethod
    def of(module: nn.Module, names: tuple[str, ...]) -> Rows:
        """The stacks called `names` that the module has, taken apart."""
        stacks = {name: t for name in names if (t := getattr(module, name)) is not None}
        return Rows(names, stacks, {name: t.unbind(0) for name, t in stacks.items()}, torch.is_grad_enabled())

    def now(self, module: nn.Module) -> Rows:
        """These rows, or the module's of now: a state may meet a copy of its stream, or gradients switched on."""
        if self.tracked or not torch.is_grad_enabled():
            name = next(iter(self.stacks), None)
            if name is None or self.stacks[name] is getattr(module, name):
                return self
        return Rows.of(module, self.names)

    def get(self, name: str, row: int) -> Tensor | None:
        """Row `row` of the stack `name`; None where the module has none."""
        found = self.rows.get(name)
        return None if found is None else found[row]
