"""The keys of a state dict that are a family's own, found under any prefix.

    model.layers.1.mlp_res_proj.weight
    └─ prefix ──┘│ └─ name in the table, from the number on
                 └─ i

A prefix is whatever stands before the part of a name that the table fixes: it is found, not assumed, and has to be the
same for all rows that share a container. What the list of Transformer layers is called is part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from twoaxis.model.originals.table import Row

if TYPE_CHECKING:
    from twoaxis.model.originals.family import Family


class Match(NamedTuple):
    """A key that a row takes, what stands before the row's name in it, its number, and which spelling it is in."""

    row: Row
    prefix: str
    number: int | None
    key: str
    spelling: int


class Keys:
    """The tensors of one family in a state dict, by their row and number.

    Args:
        family: whose table is used.
        tensors: the state dict; only the shapes and values of the family's own keys are looked at.
        prefix: only keys that begin with it are looked at.
    """

    def __init__(self, family: Family, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self.family, self.tensors = family, tensors
        self.all = [key for key in tensors if key.startswith(prefix)]
        aside = re.compile(family.aside)
        self.own = [key for key in self.all if re.search(family.namespace, key) and not aside.search(key)]
        """Every key of the method's own namespace."""
        matches = [m for row in family.rows for m in self._matches(row) if not aside.search(m.key)]
        # rows of one name differ in their number of dimensions; one that fits none is left to the first
        fitting = {m.key for m in matches if len(m.row.dims) == tensors[m.key].dim()}
        matches = [m for m in matches if m.key not in fitting or len(m.row.dims) == tensors[m.key].dim()]
        self.paths: list[str] = []
        """Paths of the modules, where they are numbered by their order."""
        if family.numbered_modules:
            # a leaf such as a norm's may be another module's as well: a module is one with a key of the namespace
            owners = {m.prefix for m in matches if re.search(family.namespace, m.key)}
            self.paths = sorted(owners, key=lambda path: [int(p) for p in path.split(".") if p.isdigit()])
            numbers = {path: number for number, path in enumerate(self.paths)}
            matches = [m._replace(prefix="", number=numbers[m.prefix]) for m in matches if m.prefix in owners]
        self.found: dict[tuple[Row, int | None], str] = {}
        """Key of each row and number."""
        self.prefixes: dict[bool, set[str]] = {}
        """What was found before names of the list of layers, and before others."""
        for match in matches:
            prefixes = self.prefixes.setdefault(self._in_layers(match.row), set())
            prefixes.add(match.prefix)
            other = self.found.setdefault((match.row, match.number), match.key)
            if other != match.key and len(prefixes) == 1:
                raise ValueError(f"{family.name}: {other} and {match.key} are two spellings of one tensor")
        self._spelling = max((m.spelling for m in matches if m.row.also), default=0)
        self.strange = sorted({*self.own} - {m.key for m in matches})
        """Keys of the namespace that no row knows."""

    @property
    def count(self) -> int:
        """How many layers, or modules, the keys speak of."""
        return max((i for _, i in self.found if i is not None), default=-1) + 1

    def of(self, row: Row) -> dict[int | None, Tensor]:
        """A row's tensors by number."""
        return {i: self.tensors[key] for (have, i), key in self.found.items() if have == row}

    def spell(self, row: Row, i: int | None = None) -> str:
        """How the tensor is, or would be, called here: in another spelling than the first if there is any of it."""
        if (row, i) in self.found:
            return self.found[row, i]
        if self.paths and i is not None:
            return self.paths[i] + row.theirs
        name = (row.theirs, *row.also)[min(self._spelling, len(row.also))].replace("{i}", str(i))
        found = self.prefixes.get(self._in_layers(row))
        return name if not found else min(found) + name.removeprefix(self.family.layers)

    def check(self) -> None:
        """Refuse a state dict without the family's names, or with several models in it."""
        first = self.family.rows[0].theirs
        if not self.found:
            raise ValueError(f"{self.family.name}: none of its names is there; they look like {first}")
        for in_layers, found in self.prefixes.items():
            if len(found) > 1:
                like = next(row.theirs for row in self.family.rows if self._in_layers(row) == in_layers)
                raise ValueError(
                    f"{self.family.name}: names like {like} are there under several prefixes, "
                    f"{', '.join(repr(p) for p in sorted(found))}; give prefix= to pick one"
                )

    def _in_layers(self, row: Row) -> bool:
        return bool(self.family.layers) and row.theirs.startswith(self.family.layers)

    def _matches(self, row: Row) -> Iterator[Match]:
        for spelling, spelt in enumerate((row.theirs, *row.also)):
            name = spelt.removeprefix(self.family.layers)
            pattern = re.compile(r"((?:.+\.)?)" + re.escape(name).replace(r"\{i\}", r"(\d+)"))
            tail = name.rpartition("{i}")[2]  # spares most of the keys of a large model the regular expression
            for key in self.all:
                if key.endswith(tail) and (match := pattern.fullmatch(key)):
                    groups = match.groups()
                    yield Match(row, groups[0], int(groups[1]) if len(groups) > 1 else None, key, spelling)


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
