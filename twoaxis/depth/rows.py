"""Streams whose parameters are stacks with a row per site.

A method keeps one tensor per kind of parameter with a row per site (`tables`). Indexed at every site, each site's
backward would fill and add a gradient of the whole stack: work that grows with the square of the depth. The tables are
taken apart once per pass, so that autograd puts the rows' gradients together once; they travel with the state, with a
stamp of the parameters they were made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Layout, Stamp, Stream

Row = Mapping[str, Tensor]
"""What a site has of each table, by the table's name."""


class Rows(NamedTuple):
    """The tables of a pass: taken apart, by name, and what they were made of."""

    tables: dict[str, tuple[Tensor, ...]]
    stamp: Stamp


class RowStream(Stream):
    """A stream with tables; subclasses fill in `tables` and keep `take_apart` in their state."""

    def __init__(self, config: Any, layout: Layout) -> None:
        super().__init__(config, layout)
        self.used = [site for site in layout.used() if site.kind != OUT]
        """The sub-layers' sites that use the method."""
        self.rows = {site.index: row for row, site in enumerate(self.used)}
        """Row of each of them in the tables."""
        self.reads_out = self.uses(layout.out)
        """Whether the out site uses the method."""

    def tables(self) -> dict[str, Tensor]:
        """What sites need of the parameters: tensors with a row per site, in float32 at least; once per pass."""
        raise NotImplementedError(f"{type(self).__name__} does not define tables")

    def take_apart(self) -> Rows:
        """The rows for one pass."""
        return Rows(self._apart(), Stamp.of(self._tensors()))

    def row(self, row: int, tables: Mapping[str, Sequence[Tensor]] | None = None) -> Row:
        """One row of each table."""
        return {name: rows[row] for name, rows in (self._apart() if tables is None else tables).items()}

    def row_of(self, site: Site, rows: Rows) -> Row:
        """The row of a site that uses the method; from new tables where those of the pass are stale."""
        return self.row(self.rows[site.index], rows.tables if rows.stamp.holds(self._tensors()) else None)

    def _apart(self) -> dict[str, tuple[Tensor, ...]]:
        return {name: table.unbind(0) for name, table in self.tables().items()}

    def _tensors(self) -> Iterable[Tensor | None]:
        return chain(self._parameters.values(), self._buffers.values())
