"""What a stream or a mixer declares about itself: its card for the map, and the quantities inspection may look at.

The map that `twoaxis methods` prints, and the page of each method, are made of cards, the module's docstring (equation
and drawing), the options' docstrings, the counts and the published records. Nothing about a method is said twice.

A quantity is a tensor with the names of its axes:

    value     (..., *axes)    the leading dimensions are the tokens'; none where the quantity is the same for all tokens
    gate      ()              one number per token
    write     (stream)        one per stream
    mix       (to, from)      a matrix

A method says what is special to it here, so that what prints and draws knows no method by name. The numbers of a model
never depend on a quantity being looked at.

A parameter is declared once, in the constructor, with all that is to be known about it; `reset_parameters`, `neutral_`
and the optimiser's groups follow from the table (`Declared`):

    self.parameter("gate", blocks, start=0.5, neutral=0.0)
    self.parameter("query", sites, width, start=Normal(0.02), decay=True)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

Goal = Literal["shortcut", "mixing", "retrieval", "-"]
"""What a method is for.

shortcut: how a sub-layer's output is added. mixing: neighbouring tokens see each other. retrieval: later layers read
earlier ones. -: none of these.
"""


class Shape(NamedTuple):
    """The decoder that a suggestion is for."""

    blocks: int  # number of blocks
    width: int  # of the residual stream
    heads: int  # of the attention
    kv_heads: int  # its key and value heads
    gpu: bool = True  # whether it runs on a GPU, whose kernels take whole tiles of tokens

    @property
    def even_heads(self) -> int:
        """As many heads as the attention has, or the nearest number below that cuts the width into even heads."""
        return next(n for n in range(self.heads, 0, -1) if self.width % n == 0 and (self.width // n) % 2 == 0)

    @property
    def even_kv_heads(self) -> int:
        """Key and value heads for so many heads, as few as the attention's."""
        return next(n for n in range(min(self.kv_heads, self.even_heads), 0, -1) if self.even_heads % n == 0)


class Suggestion(NamedTuple):
    """A form of a method that is worth trying first; advice weighs it by the records of that form.

    Attributes:
        form: as the records call it; nothing is the method itself.
        why: what it does, in a line; nothing is the purpose on the card.
        options: of the method for a decoder, `placement` among them.
    """

    form: str = ""
    why: str = ""
    options: Callable[[Shape], dict[str, Any]] = lambda shape: {}


@dataclass(frozen=True, kw_only=True)
class Card:
    """One row of the map.

    Every field is a short phrase; "-" where it does not apply. What a method leaves out is as most methods have it.
    """

    title: str
    """The method's name as people write it."""
    purpose: str = "-"
    """What it does, in a line."""
    goal: Goal = "-"
    """What it is for: a better shortcut, local mixing of tokens, or retrieval across depth."""
    axis: Literal["depth", "sequence"] = "depth"
    """The axis it reads along."""
    source: str
    """What one source is."""
    query: str = "-"
    """Where the query comes from."""
    key: str = "-"
    """Where keys come from."""
    value: str
    """Where values come from."""
    literal_qkv: bool = False
    """Whether the read is literally softmax(q k) v, hence the paper's operator on this axis."""
    normaliser: str = "none"
    """How weights are normalised."""
    adaptivity: str
    """Static weights, or per token, or per channel."""
    window: str
    """What a read may see."""
    granularity: str = "per sub-layer"
    """Per sub-layer or per block."""
    ways: str = "one"
    """Which inputs are read separately."""
    injection: str
    """Where the read enters."""
    sharing: str = "none"
    """Which parameters are shared over depth or tokens."""
    gating: str = "-"
    """What gates the read or write."""
    depth_state: str
    """What is carried from layer to layer."""
    token_state: str = "none"
    """What is kept from token to token."""
    paper: str
    """Authors, title, arXiv number."""
    year: int = 0
    """Of the paper, by its first arXiv number unless it is given."""

    def __post_init__(self) -> None:
        if not self.year and (found := re.search(r"arXiv (\d\d)\d\d\.", self.paper)):
            object.__setattr__(self, "year", 2000 + int(found.group(1)))

    @staticmethod
    def blank(title: str, axis: Literal["depth", "sequence"] = "depth") -> Card:
        """The card of a method that has none."""
        words = ("source", "value", "normaliser", "adaptivity", "window", "granularity", "injection", "sharing")
        return Card(title=title, axis=axis, **dict.fromkeys((*words, "depth_state", "paper"), "-"))


# Cards of the families; a method says where it differs.
history_card = partial(Card, goal="retrieval", sharing="none over depth, shared by all tokens")
parallel_card = partial(
    Card,
    goal="shortcut",
    source="one of n parallel streams",
    value="streams",
    window="the current n streams",
    injection="replaces the read, the shortcut and the write",
    depth_state="n streams",
)
local_card = partial(
    Card,
    goal="mixing",
    axis="sequence",
    source="token",
    value="tokens in the window",
    granularity="per block",
    sharing="own weights per block, shared over tokens",
    depth_state="none",
)


class NamedRange(NamedTuple):
    """A range of a quantity that has a name, `low` included and `high` not, the last of several included."""

    name: str  # such as skip
    low: float  # where it begins
    high: float  # where it ends


class Quantity(NamedTuple):
    """A quantity to look at.

    In the dictionaries that `quantities` returns, names of the form `quantity, part` are parts of one quantity and
    belong into one drawing.
    """

    value: Tensor  # (..., *axes) in float32 at least
    axes: tuple[str, ...] = ()  # what the dimensions after the tokens' are
    regimes: tuple[NamedRange, ...] = ()  # named ranges, from low to high without gaps, where the method has such
    # what it is, for somebody who does not know the method: what may stand behind its name and a colon
    meaning: str = ""

    @property
    def per_token(self) -> bool:
        """Whether it differs from token to token."""
        return self.value.dim() > len(self.axes)


class Normal(NamedTuple):
    """A start: independent normal numbers."""

    std: float | None = None  # their standard deviation; None is the model's for projections


class Uniform(NamedTuple):
    """A start: independent numbers between `-bound` and `bound`."""

    bound: float

    def __call__(self, t: Tensor, generator: torch.Generator | None) -> None:
        """Fill a tensor."""
        t.uniform_(-self.bound, self.bound, generator=generator)


class OneAt(NamedTuple):
    """A start: `value` at one place of the last dimension, zero elsewhere; the last place is the newest source's."""

    place: int = -1
    value: float = 1.0

    def __call__(self, t: Tensor, generator: torch.Generator | None) -> None:
        """Fill a tensor."""
        t.zero_()[..., self.place] = self.value


Start = float | Normal | Callable[[Tensor, torch.Generator | None], Any]
"""What a parameter begins with: a number for every entry, a normal draw, or a function that fills a plain tensor."""


class ParameterGroup(NamedTuple):
    """How an optimiser should treat some of a method's parameters."""

    names: tuple[str, ...]  # parameter names, as `named_parameters` gives them
    decay: bool = False  # whether weight decay applies
    rate: float = 1.0  # multiplier of the learning rate
    float32: bool = True  # keep in float32 whatever the model's dtype


class Entry(NamedTuple):
    """One line of the parameter table."""

    start: Start
    neutral: Start | None
    decay: bool
    rate: float
    float32: bool


Neutral = Literal["bitwise", "rounding", "scale", "none"]
"""How exactly a method at its neutral parameters equals the model without it.

bitwise: to the last bit; a local operator's increment is zero at a site of its own, its output is its input elsewhere.
rounding: up to the order of summation. scale: up to the pre-norm's epsilon, because the method's read is a multiple of
the plain one. none: no parameters make it plain; for a stream use `Blend`.
"""


class Declared(nn.Module):
    """A stream or a local operator: what it says about itself, and a table of its own parameters."""

    name: ClassVar[str]
    """What the registry calls it."""
    Config: ClassVar[type]
    """Its options: a frozen keyword-only dataclass."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Names that people use, in small letters without separators; `name:k=v` where one stands for options too."""
    card: ClassVar[Card]
    """Its row of the map of methods."""
    suggestions: ClassVar[tuple[Suggestion, ...]] = (Suggestion(),)
    """The forms that advice proposes."""
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Options that between them use every part of the method: what certificates and conformance tests run."""
    neutral_options: ClassVar[Mapping[str, Any]] = {}
    """Options with an exact neutral start, for a pretrained model, in place of defaults that have none."""
    neutral: Neutral = "none"
    """The neutral class of the method with these options; `__init__` may set it."""
    remedy: ClassVar[str] = "choose others"
    """What helps where there are no neutral parameters."""

    if TYPE_CHECKING:  # what `parameter` declares needs no annotation of its own

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self) -> None:
        super().__init__()
        self._table: dict[str, Entry] = {}

    def parameter(
        self,
        name: str,
        *shape: int,
        start: Start = 0.0,
        neutral: Start | None = None,
        decay: bool = False,
        rate: float = 1.0,
        float32: bool = True,
        needed: bool = True,
        learned: bool = True,
    ) -> None:
        """Declare a parameter. One that is not needed, or would have no entries, is registered as None.

        Args:
            name: as in saved files; `stack.key` is the entry `key` of the ParameterDict `stack`.
            *shape: of the parameter.
            start: its initial value, as published.
            neutral: what `neutral_` sets it to; None leaves it alone.
            decay: whether weight decay applies.
            rate: multiplier of the learning rate.
            float32: keep it in float32 whatever the model's dtype.
            needed: whether these options have it.
            learned: False makes it a buffer, which stays at its start.
        """
        there = needed and 0 not in shape
        stack, _, key = name.rpartition(".")
        if stack and not hasattr(self, stack):
            self.add_module(stack, nn.ParameterDict())
        if not there:
            if not stack:
                self.register_parameter(name, None)
            return
        if stack:
            getattr(self, stack)[key] = nn.Parameter(torch.empty(shape))
        elif learned:
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        else:
            self.register_buffer(name, torch.empty(shape))
        self._table[name] = Entry(start, neutral, decay, rate, float32)

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Set every parameter to the method's published initial value.

        Args:
            generator: of the draws, which happen in the order of declaration.
            std: standard deviation of the model's projections.
        """
        for name, entry in self._table.items():
            self._fill(name, entry.start, generator, std)

    def neutral_(self) -> None:
        """Set as few parameters as possible to values at which the method is plain, up to its neutral class.

        What is set must get a gradient at once, and the others as soon as it has moved: of two factors in series only
        one may be zero.
        """
        if self.neutral == "none":
            raise ValueError(f"{self.name} has no neutral parameters with {self.config}: {self.remedy}")
        for name, entry in self._table.items():
            if entry.neutral is not None:
                self._fill(name, entry.neutral, None, 0.0)

    def dead(self) -> dict[str, str]:
        """Parameters, or rows of them (`name[row]`), that can never get a gradient, and why."""
        return {}

    def _fill(self, name: str, value: Start, generator: torch.Generator | None, std: float) -> None:
        stack, _, key = name.rpartition(".")
        tensor: Tensor = getattr(self, stack)[key] if stack else getattr(self, name)
        # a plain tensor is filled and copied as a whole: writing into parts of a sharded one is lost
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if isinstance(value, int | float):
            plain.fill_(value)
        elif isinstance(value, Normal):
            plain.normal_(0.0, std if value.std is None else value.std, generator=generator)
        else:
            with torch.no_grad():
                value(plain, generator)
        with torch.no_grad():
            tensor.copy_(plain)
