"""Options: frozen dataclasses whose values are checked against their annotations before anything computes with them.

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        window: Count = 16
        rate: Share | None = None

        def validate(self) -> None: ...          # rules between fields

Without the check a mistyped option (`window="3"`, `block_size=2.5`, `heads=True`) fails far from where it was written,
or does not fail at all: True counts as 1, and any text is true. A bound stands in the annotation, so that every field
is checked by the same code, whether it comes from the command line, a file or Python.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from twoaxis.base.files import file_errors
from twoaxis.base.machine import needs
from twoaxis.base.registry import did_you_mean

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest integer that any option takes; tensors and generators count with 64 bits."""


@dataclass(frozen=True)
class Bound:
    """A range of numbers, for `Annotated`."""

    low: float = -math.inf  # the smallest value, or the one below all if `open_low`
    high: float = math.inf  # the largest value, or the one above all if `open_high`
    open_low: bool = False  # whether `low` itself is refused
    open_high: bool = False  # whether `high` itself is refused

    def holds(self, value: float) -> bool:
        """Whether a number lies in the range."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def demand(self, value: float) -> str:
        """What a number outside the range must be, in words that follow "must"."""
        if self.high <= 1:
            return f"be at least {self.low:g} and below 1" if self.open_high else f"lie between {self.low:g} and 1"
        if value > self.low:
            return f"be {'below' if self.open_high else 'at most'} {self.high:.15g}"
        if self.low == 0:
            return "be positive" if self.open_low else "not be negative"
        return f"be {'above' if self.open_low else 'at least'} {self.low:.15g}"


def at_least(low: float) -> Bound:
    """Numbers from `low` on."""
    return Bound(low=low)


def between(low: float, high: float) -> Bound:
    """Numbers from `low` to `high`, both included."""
    return Bound(low=low, high=high)


Count = Annotated[int, at_least(1)]
"""A number of things."""
NotNegative = Annotated[float, at_least(0)]
"""Zero or more."""
Positive = Annotated[float, Bound(low=0, open_low=True)]
"""More than zero."""
Share = Annotated[float, between(0, 1)]
"""A part of a whole."""
Fraction = Annotated[float, Bound(low=0, high=1, open_high=True)]
"""A part of a whole that is never all of it."""

_WORDS = {int: "an integer", float: "a finite number", bool: "True or False", str: "text", types.NoneType: "None"}


class Options:
    """Base class of dataclasses of options."""

    def __post_init__(self) -> None:
        check_types(self)
        self.validate()

    def validate(self) -> None:
        """Refuse combinations of fields with a `ValueError`; each field alone is checked before."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], what: str = "") -> Self:
        """Options from plain values; an unknown name is an error that suggests the nearest one.

        Lists stand for tuples, and a float without a fraction for an integer. `what` they are is for messages.
        """
        plain = {name: _plain(value, field_types(cls).get(name)) for name, value in values.items()}
        return from_fields(cls, plain, what or cls.__name__)


def from_fields(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """An instance of a dataclass from values by name, with names, types and bounds checked; lists stand for tuples."""
    hints = field_types(cls)
    check_names(values, hints, what)
    for name, value in values.items():
        check_type(name, value, hints[name])
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def from_record(cls: type[T], values: Any, what: str, remedy: str) -> T:
    """An instance of a dataclass from a record that was written by the program, as JSON gives it.

    Records within records are read alike, a field with a default may be missing, and names that nobody knows are passed
    over, so that a later version can read it. A message has `what` (its file), the place and the `remedy`.
    """
    try:
        return _record(cls, values, "")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{what} is damaged at {error}. {remedy}") from error


def _record(hint: Any, value: Any, place: str) -> Any:
    """What a value of a record stands for; an error begins with its place."""
    where = place or "the whole"
    if value is not None:  # a record that may be missing
        hint = next((part for part in _parts(hint) if dataclasses.is_dataclass(part)), hint)
    if get_origin(hint) is tuple and isinstance(value, list):
        inner = get_args(hint)[0]
        value = tuple(_record(inner, each, f"{place}[{number}]") for number, each in enumerate(value))
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: a table is wanted, got {_short(value)}")
        inside = {name: f"{place}.{name}" if place else name for name in field_types(hint)}
        for field in dataclasses.fields(hint):
            if field.name not in value and field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{inside[field.name]}: it is missing")
        known = {
            name: _record(kind, value[name], inside[name]) for name, kind in field_types(hint).items() if name in value
        }
        try:
            return hint(**known)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error
    try:
        value = _plain(value, hint)
        check_type(place.rpartition(".")[2], value, hint)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return value


def check_names(values: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Refuse names of options that are not known; `what` says whose options they are."""
    for name in values:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"{what} has no option {name!r}{did_you_mean(str(name), known)}; its options are {listed}")


def check_types(options: object) -> None:
    """Refuse an instance of a dataclass whose values are not what its annotations say; unknown annotations pass."""
    for name, hint in field_types(type(options)).items():
        check_type(name, getattr(options, name), hint)


def check_type(name: str, value: object, hint: Any) -> None:
    """Refuse a value that is not what its annotation says, which may have bounds, or lies beyond them."""
    hint, bounds = _without_bounds(hint)
    if not _fits(value, hint):
        choices = [choice for part in _parts(hint) if get_origin(part) is Literal for choice in get_args(part)]
        if choices:
            near = did_you_mean(str(value), map(str, choices))
            raise ValueError(f"unknown {name} {_short(value)}{near}; it is one of {', '.join(map(str, choices))}")
        raise ValueError(f"{name} must be {' or '.join(map(_words, _parts(hint)))}, got {_short(value)}")
    numbers = value if isinstance(value, tuple | list) else [value]
    for number in filter(_is_number, numbers):
        for bound in bounds:
            if not bound.holds(number):
                raise ValueError(f"{name} must {bound.demand(number)}, got {_short(number)}")
        if isinstance(number, int) and abs(number) > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST}, got {_short(number)}")


@cache
def field_types(options: type) -> dict[str, Any]:
    """Annotation of each field with its bounds; nothing where they cannot be evaluated, as in a class in a function."""
    names = {field.name for field in dataclasses.fields(options)} if dataclasses.is_dataclass(options) else set()
    try:
        hints = get_type_hints(options, include_extras=True)
    except NameError:
        hints = dict.fromkeys(names, Any)
    return {name: hint for name, hint in hints.items() if name in names}


@cache
def field_docs(options: type) -> dict[str, str]:
    """The text under each field of a class and of those it inherits from, in one line each, from their source."""
    docs: dict[str, str] = {}
    for cls in reversed(options.__mro__[:-1]):
        try:
            body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
        except (OSError, TypeError, IndentationError):
            continue  # a class that was made without a file
        for field, text in itertools.pairwise(body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def read_fields(path: str | Path) -> dict[str, Any]:
    """The table in a TOML, JSON or YAML file, by the ending of its name."""
    path = Path(path)
    with file_errors(path, "read"):
        data = path.read_bytes()
    try:
        values = _parsed(path.suffix.lower(), data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a table of options, got {type(values).__name__}")
    return values


def _parsed(kind: str, data: bytes) -> Any:
    if kind == ".toml":
        import tomllib

        return tomllib.loads(data.decode("utf-8"))
    if kind == ".json":
        import json

        return json.loads(data)
    if kind in (".yaml", ".yml"):
        try:
            import yaml
        except ModuleNotFoundError as error:
            raise ValueError(needs("YAML", "pyyaml")) from error
        try:
            return yaml.safe_load(data)
        except yaml.YAMLError as error:
            raise ValueError(str(error).replace("\n", " ")) from error
    raise ValueError(f"its name ends in {kind!r}, not in .toml, .json or .yaml")


def parse_integer(text: str) -> int:
    """An integer as people write it on a command line: 300, 1e6, 300k, 2M, 1.5B, 10_000."""
    words = text.strip().replace("_", "").replace(",", "")
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}.get(words[-1:].lower(), 1)
    try:
        number = Decimal(words[:-1] if scale > 1 else words) * scale
        if not number.is_finite() or abs(number) > LARGEST or number != int(number):
            raise ValueError
    except (ValueError, InvalidOperation):
        raise ValueError(f"expected an integer such as 500, 300k or 2M, got {_short(text)}") from None
    return int(number)


def _plain(value: Any, hint: Any) -> Any:
    """A value of a file in the form the annotation wants: an integer for 1e6."""
    parts = _parts(_without_bounds(hint)[0])
    if isinstance(value, float) and int in parts and float not in parts and value.is_integer():
        return int(value)
    return value


def _without_bounds(hint: Any) -> tuple[Any, list[Bound]]:
    """An annotation without `Annotated`, also inside a union, and the bounds that stood in it."""
    if get_origin(hint) is Annotated:
        inner, bounds = _without_bounds(get_args(hint)[0])
        return inner, [*bounds, *(note for note in get_args(hint)[1:] if isinstance(note, Bound))]
    if get_origin(hint) is tuple:
        inner, bounds = _without_bounds(get_args(hint)[0])
        return tuple[inner, ...], bounds
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_without_bounds(part) for part in get_args(hint)]
        return Union[tuple(part for part, _ in parts)], [bound for _, bounds in parts for bound in bounds]  # noqa: UP007
    return hint, []


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: object, hint: Any) -> bool:
    parts = _parts(hint)
    if len(parts) > 1:
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) in (dict, Mapping):
        inner = get_args(hint)[1] if get_args(hint) else Any
        return isinstance(value, Mapping) and all(_fits(item, inner) for item in value.values())
    if hint is float:  # math.isfinite would overflow with an integer of hundreds of digits
        return _is_number(value) and -math.inf < value < math.inf
    if hint is int:
        return isinstance(value, int) and _is_number(value)
    return hint not in _WORDS or isinstance(value, hint)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a tuple (each {' or '.join(map(_words, _parts(get_args(hint)[0])))})"
    return _WORDS.get(hint, str(hint))


def _short(value: object) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"{'-' if value < 0 else ''}an integer of {value.bit_length() * 3 // 10} digits or more"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
