"""The two-way table of a family: what each tensor and each setting of an original is called there and here.

    Row("layers.{i}.attn_hc.fn", "fn[2*i]", "(n*n + 2*n, n*D)")

reads: the tensor of layer i is entry 2i of our parameter `fn`, and its shape tells n and D, or has to agree with them.
Reading and writing are both derived from the rows. Letters stand for sizes; `i` is the number of a layer, `L` how many
there are, `S` how many sub-layers. A tensor that has other dimensions here and there, such as (1, D) and (D,), is
reshaped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from twoaxis.base.registry import parse_value
from twoaxis.depth.stream import Stream

if TYPE_CHECKING:
    from twoaxis.model.originals.convert import Reading

REQUIRED = object()
"""Default of a setting that cannot be guessed."""
BLOCK = ("attention", "mlp")

Letters = Mapping[str, int]
Kinds = Sequence[str] | Sequence[Sequence[str]]


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
            several; `norms.*` are pre-norms that only exist because of the method, which are read and not written. Of
            several rows for one entry the first that its form allows is written.
        shape: theirs; a letter that is not known yet is found from it.
        note: what a reader would get wrong.
        also: other spellings of `theirs`.
        form: the variant of the original that has it, found if any tensor of that form is there: `option=value` is one
            that an option of ours stands for, any other word a group of tensors. Empty: all have it.
        where: for which `i` and sizes it is there; empty: all.
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

    @property
    def option(self) -> tuple[str, Any] | None:
        """The option that the form stands for, and its value."""
        name, equals, value = self.form.partition("=")
        return (name, parse_value(value)) if equals else None

    def scopes(self, letters: Letters) -> Iterator[tuple[int | None, dict[str, int]]]:
        """The numbers that have this tensor, None where there is one alone, each with the letters it is placed by."""
        numbered = "{i}" in self.theirs or "[i]" in self.ours
        for i in range(letters["L"]) if numbered else (None,):
            scope = {**letters, **({} if i is None else {"i": i})}
            if not self.where or (names(self.where) <= scope.keys() and evaluate(self.where, scope)):
                yield i, scope

    def place(self, letters: Letters) -> tuple[str, int | None]:
        """Our parameter, and which of its entries."""
        name, _, index = self.ours.partition("[")
        return fill(name, letters), evaluate(index[:-1], letters) if index else None

    def bind(self, shape: Sequence[int], letters: dict[str, int]) -> bool:
        """Whether a tensor has the row's shape; what the shape tells is added to `letters`."""
        if len(shape) != len(self.dims):
            return False
        for dim, size in zip(self.dims, shape, strict=True):
            if unknown := names(dim) - letters.keys():
                (letter,) = unknown  # rows stand in an order in which each size tells one letter at most
                sizes = range(1, size + 1)
                at = bisect_left(sizes, size, key=lambda n, dim=dim, at=letter: evaluate(dim, {**letters, at: n}))
                letters[letter] = at + 1
            if evaluate(dim, letters) != size:
                return False
        return True

    def expected(self, letters: Letters) -> str:
        """The shape in numbers, as far as they are known."""
        known = [str(evaluate(dim, letters)) if names(dim) <= letters.keys() else dim for dim in self.dims]
        return f"({', '.join(known)}{',' * (len(known) == 1)})"


def each_site(called: tuple[str, str], *rows: Row) -> tuple[Row, ...]:
    """Rows of a sub-layer for both of a block, by what stands for `{site}` in their names: entries 2i and 2i + 1."""
    return tuple(
        row._replace(
            theirs=row.theirs.replace("{site}", site),
            ours=f"{row.ours}[{entry}]",
            also=tuple(name.replace("{site}", site) for name in row.also),
        )
        for site, entry in zip(called, ("2*i", "2*i + 1"), strict=True)
        for row in rows
    )


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


@dataclass(frozen=True)
class Family:
    """One original's names: tables, and functions for what tables cannot say."""

    name: str
    """What `read_stream(like=)` takes."""
    stream: str
    """Our stream."""
    _: KW_ONLY
    rows: tuple[Row, ...]
    """The tensors; the family is recognised by the name, and the dimensions and fixed sizes, of the first."""
    namespace: str
    """A regular expression: keys that are the method's own."""
    aside: str = r"(?!)"
    """A regular expression: keys that look like the method's own but belong to another part of the model."""
    settings: tuple[Setting, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Letters of the shapes, and the options that they are."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Options that are so there unless a form, a setting or `options` says otherwise."""
    each: str = ""
    """Letters that stand for another size in each layer."""
    layers: str = "layers."
    """What the list of layers is called; a checkpoint may call it otherwise."""
    kinds: tuple[tuple[str, ...], ...] = (BLOCK,)
    """The sub-layers that its blocks may have; empty: any."""
    beyond: tuple[str, ...] = ()
    """Options that no original has to know: how something is computed, and where it once began."""
    numbered_modules: bool = False
    """Whether modules lie anywhere and are numbered by the order of the numbers in their paths."""
    recognised: bool = True
    """Whether names alone tell the family."""
    writes: bool = True
    """Whether there is a way back."""
    find: Callable[[Reading], dict[str, int]] | None = None
    """Letters that no shape tells by itself."""
    options: Callable[[Reading], dict[str, Any]] | None = None
    """Options beyond forms, sizes and settings; refuses what there is no counterpart for."""
    layout: Callable[[Reading], tuple[int, Kinds]] | None = None
    """Number of blocks and their sub-layers, where they are not L blocks of attention and MLP."""
    unused: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda options: ()
    """Parameters that the original keeps without using them, by our options."""
    letters: Callable[[Stream], dict[str, int]] = lambda made: {}
    """Letters of a stream that `sizes` does not have."""
    translate: Callable[[Stream], dict[str, Any]] = lambda made: {}
    """The settings of a stream that are not copied."""


def fill(text: str, letters: Letters) -> str:
    """A name with the expressions in braces computed."""
    return re.sub(r"\{(.+?)\}", lambda found: str(evaluate(found[1], letters)), text)


def evaluate(expression: str, letters: Letters) -> int:
    """What an expression of a table is; the tables are part of this package."""
    return eval(_code(expression), {"__builtins__": {}}, dict(letters))


def names(expression: str) -> set[str]:
    """The letters in an expression."""
    return set(_code(expression).co_names)


@cache
def _code(expression: str) -> CodeType:
    return compile(expression, expression, "eval")
