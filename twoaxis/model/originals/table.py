"""The two-way table of a family: what each tensor and each setting of an original is called there and here.

    Row("layers.{i}.attn_hc.fn", "fn[2*i]", "(n*n + 2*n, n*D)")

reads: the tensor of layer i is entry 2i of our parameter `fn`, and its shape tells n and D, or has to agree with them.
Reading and writing are both derived from the rows. Letters stand for sizes; `i` is the number of a layer and `L` how
many there are. A tensor that has other dimensions here and there, such as (1, D) and (D,), is reshaped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

REQUIRED = object()
"""Default of a setting that cannot be guessed."""

Letters = Mapping[str, int]


class View(NamedTuple):
    """How the numbers of a tensor become ours, and the way back."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


AS_IS = View(lambda t: t, lambda t: t)
TRANSPOSED = View(lambda t: t.mT, lambda t: t.mT)
PLUS_ONE = View(lambda t: t + 1, lambda t: t - 1)


class Row(NamedTuple):
    """One line of a family's table: a tensor of the original and where it goes.

    Attributes:
        theirs: its name; `{i}` stands for the number of a layer.
        ours: the parameter it becomes: `name`, `name[index]` for an entry of a stacked one, `name.{number}` for one of
            several; `norms.*` are pre-norms that only exist because of the method, which are read and not written.
        shape: theirs; a letter that is not known yet is found from it.
        note: what a reader would get wrong.
        also: other spellings of `theirs`.
        form: the variant of the original that has it; found if any tensor of that form is there. Empty: all have it.
        where: which numbers `i` have it; empty: all.
        absent: what its numbers are if it is not there; None: it has to be.
        view: how its numbers become ours.
    """

    theirs: str
    ours: str
    shape: str
    note: str = ""
    also: tuple[str, ...] = ()
    form: str = ""
    where: str = ""
    absent: float | None = None
    view: View = AS_IS

    @property
    def dims(self) -> list[str]:
        """The expressions of the shape."""
        return [dim.strip() for dim in self.shape[1:-1].split(",") if dim.strip()]

    def numbers(self, letters: Letters) -> Iterator[int | None]:
        """The numbers that have this tensor; None where there is one alone."""
        if "{i}" not in self.theirs and "[i]" not in self.ours:
            yield None
            return
        for i in range(letters["L"]):
            if not self.where or evaluate(self.where, {**letters, "i": i}):
                yield i

    def place(self, letters: Letters) -> tuple[str, int | None]:
        """Our parameter, and which of its entries."""
        name, _, index = self.ours.partition("[")
        return fill(name, letters), evaluate(index[:-1], letters) if index else None

    def bind(self, shape: Sequence[int], letters: dict[str, int]) -> bool:
        """Whether a tensor has the row's shape; what the shape tells is added to `letters`."""
        if len(shape) != len(self.dims):
            return False
        for dim, size in zip(self.dims, shape, strict=True):
            unknown = [name for name in _code(dim).co_names if name not in letters]
            if unknown:
                (letter,) = unknown  # rows stand in an order in which each size tells one letter at most
                sizes = range(1, size + 1)
                at = bisect_left(sizes, size, key=lambda n, dim=dim, at=letter: evaluate(dim, {**letters, at: n}))
                letters[letter] = at + 1
            if evaluate(dim, letters) != size:
                return False
        return True

    def expected(self, letters: Letters) -> str:
        """The shape in numbers, as far as they are known."""
        known = [str(evaluate(d, letters)) if set(_code(d).co_names) <= set(letters) else d for d in self.dims]
        return f"({', '.join(known)}{',' * (len(known) == 1)})"


class Setting(NamedTuple):
    """A field of the original's configuration that tensors do not tell.

    Attributes:
        name: in the original's configuration.
        ours: the options it becomes.
        default: the original's own; None: found in the tensors, and checked against them; REQUIRED: it has to be given.
        note: what a reader would get wrong.
        times: how many of our units are one of the original's.
        copied: whether the value is the option's; else the family translates it.
    """

    name: str
    ours: str
    default: Any = None
    note: str = ""
    times: int = 1
    copied: bool = True

    @property
    def options(self) -> list[str]:
        """The names in `ours`."""
        return self.ours.split(", ")


def fill(text: str, letters: Letters) -> str:
    """A name with the expressions in braces computed."""
    return re.sub(r"\{(.+?)\}", lambda found: str(evaluate(found[1], letters)), text)


def evaluate(expression: str, letters: Letters) -> int:
    """What an expression of a table is; the tables are part of this package."""
    return eval(_code(expression), {"__builtins__": {}}, dict(letters))


@cache
def _code(expression: str) -> CodeType:
    return compile(expression, expression, "eval")
