"""What every reader of foreign checkpoints needs: a table of names, the keys found under any prefix, and the checks.

    model.layers.1.mlp_res_proj.weight
    └─ prefix ──┘│ └─ name in the table, from the number on
                 └─ i

A prefix is whatever stands before the part of a name that the table fixes: it is found, not assumed, and has to be the
same for all rows that share a container. Keys that look like the method's own and that no row takes are an error, and
so are missing ones: a checkpoint that loads only in part is one that runs and is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from twoaxis.depth.registry import STREAMS, stream
from twoaxis.depth.stream import Stream

REQUIRED = object()
"""Default of a setting that cannot be guessed."""

Kinds = Sequence[str] | Sequence[Sequence[str]]
BLOCK = ("attention", "mlp")


class Row(NamedTuple):
    """One line of a family's table: a tensor of the original and where it goes.

    Attributes:
        container: what the original has before `name`; read as part of the prefix, written as it stands.
        name: the rest, `{i}` standing for the number of a layer.
        shape: in the letters of the documentation.
        ours: the parameter it becomes.
        note: what a reader would get wrong.
        also: other spellings of `name`.
    """

    container: str
    name: str
    shape: str
    ours: str
    note: str = ""
    also: tuple[str, ...] = ()

    @property
    def original(self) -> str:
        """The name as the original writes it."""
        return self.container + self.name


class Setting(NamedTuple):
    """A field of the original's configuration that tensors do not tell.

    Attributes:
        name: in the original's configuration.
        ours: the option it becomes.
        default: the original's own; REQUIRED has to be given.
        note: what a reader would get wrong.
    """

    name: str
    ours: str
    default: Any = None
    note: str = ""


class Adapted(NamedTuple):
    """A stream read from a foreign checkpoint.

    Attributes:
        stream: name of our stream.
        options: its options.
        state: its state dict.
        family: whose names they were.
        blocks: number of blocks.
        width: D; None where the original's tensors do not tell it.
        kinds: sub-layers of a block, or of every block.
        norms: pre-norm parameters that only this method has, as `{block}.{way}.weight`.
        consumed: the foreign keys that went into `state` and `norms`, and those the original itself never uses.
    """

    stream: str
    options: dict[str, Any]
    state: dict[str, Tensor]
    family: str
    blocks: int
    width: int | None
    kinds: Kinds = BLOCK
    norms: Mapping[str, Tensor] = MappingProxyType({})
    consumed: tuple[str, ...] = ()

    def build(self, *, width: int | None = None, kinds: Kinds | None = None, blocks: int | None = None) -> Stream:
        """The stream with the parameters loaded, in float32 at least.

        Args:
            width: needed where the original's tensors do not tell it.
            kinds: sub-layers of a block, where they are not those of the original.
            blocks: number of blocks, where they are not those of the original.
        """
        if width is not None and self.width not in (None, width):
            raise ValueError(f"the {self.family} checkpoint has width {self.width}, got width={width}")
        found = width if width is not None else self.width
        if found is None:
            raise ValueError(f"{self.family} tensors do not tell the width of the model: give width=")
        made = self._stream(found, self.kinds if kinds is None else kinds, self.blocks if blocks is None else blocks)
        dtype = torch.float32
        for tensor in self.state.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        made = made.to(dtype)
        self.fit(made)
        made.load_state_dict(self.state)
        return made

    def check(self) -> None:
        """Refuse options that do not go with the tensors."""
        STREAMS.config(self.stream, self.options)
        with torch.device("meta"):
            self.fit(self._stream(self.width or 1, self.kinds, self.blocks))

    def fit(self, made: Stream) -> None:
        """Refuse a stream that these tensors do not fill exactly."""
        want = {name: tuple(t.shape) for name, t in made.state_dict().items()}
        have = {name: tuple(t.shape) for name, t in self.state.items()}
        wrong = [
            f"{name} is {have.get(name, 'absent')} instead of {want.get(name, 'absent')}"
            for name in sorted({*want, *have})
            if want.get(name) != have.get(name)
        ]
        if wrong:
            raise ValueError(f"the {self.family} tensors do not fit {self.stream} with {self.options}: {wrong[0]}")

    def _stream(self, width: int, kinds: Kinds, blocks: int) -> Stream:
        return stream(self.stream, blocks=blocks, width=width, kinds=kinds, **self.options)


class Written(NamedTuple):
    """A stream under the original's names, and the settings that go with it."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


class Original:
    """The original's configuration: a mapping, or an object such as transformers' with `to_dict`.

    Args:
        family: whose settings these are.
        config: the whole configuration or a part; fields of no concern to the stream are passed over.
        overrides: options of our stream that the caller sets.
    """

    def __init__(self, family: Family, config: Any, overrides: Mapping[str, Any]) -> None:
        fields = config.to_dict() if hasattr(config, "to_dict") else ({} if config is None else config)
        if not isinstance(fields, Mapping):
            raise ValueError(f"a configuration is a mapping or has to_dict, got {type(config).__name__}")
        nested = fields.get("text_config")  # where a model with a vision tower keeps its decoder's
        self.fields = {**nested, **fields} if isinstance(nested, Mapping) else dict(fields)
        self.family, self.overrides = family, overrides

    def __getitem__(self, name: str) -> Any:
        setting = next(s for s in self.family.settings if s.name == name)
        given = self.fields.get(name)
        if given is None and setting.default is REQUIRED:
            raise ValueError(
                f"{self.family.name}: its tensors do not tell {name} ({setting.note}); give config={{{name!r}: ...}} "
                "or the original's whole configuration"
            )
        return setting.default if given is None else given

    def agree(self, name: str, found: Any) -> None:
        """Refuse a configuration that says something else than the tensors."""
        given = self.fields.get(name)
        if given is not None and given != found:
            raise ValueError(f"{self.family.name}: the configuration has {name}={given}, the tensors {found}")


class Family:
    """One original's names. Subclasses fill in the tables, `read` and, where there is a way back, `write`."""

    name: ClassVar[str]
    """What `read_stream(like=)` takes."""
    title: ClassVar[str]
    """Whose names they are."""
    stream: ClassVar[str]
    """Our stream."""
    rows: ClassVar[tuple[Row, ...]]
    settings: ClassVar[tuple[Setting, ...]] = ()
    namespace: ClassVar[str]
    """A regular expression: keys that are the method's own."""
    aside: ClassVar[str | None] = None
    """A regular expression: keys that look like the method's own but belong to another part of the model."""
    sign: ClassVar[str]
    """A regular expression: keys by which the family is recognised."""
    numbered_modules: ClassVar[bool] = False
    """Whether modules lie anywhere and are numbered by the order of the numbers in their paths."""
    writes: ClassVar[bool] = True
    """Whether there is a way back."""

    def detect(self, found: Found) -> bool:
        """Whether these are its names."""
        return any(re.search(self.sign, key) for key in found.own)

    def read(self, found: Found, config: Original) -> Adapted:
        """Our stream from the tensors found."""
        raise NotImplementedError(f"{type(self).__name__} does not define read")

    def write(self, made: Stream) -> Written:
        """The stream under the original's names."""
        raise ValueError(f"{self.name}: there is no way back from our parameters to these names")

    def refuse(self, made: Stream, **wanted: Any) -> None:
        """Refuse a stream whose options the original does not have."""
        for option, values in wanted.items():
            have = getattr(made.config, option)
            known = values if isinstance(values, tuple) else (values,)
            if have not in known:
                listed = " or ".join(repr(v) for v in known)
                raise ValueError(f"{self.name} has no {option}={have!r}, only {listed}")
        idle = next((s for s in made.layout.sites if not made.uses(s)), None)
        if idle is not None:
            raise ValueError(
                f"{self.name} uses its method everywhere; here the {idle.kind} site of block {idle.block} does not"
            )

    def refuse_kinds(self, made: Stream, *known: tuple[str, ...]) -> tuple[str, ...]:
        """The sub-layers of a block, if every block has the same that the original has."""
        kinds = {tuple(s.kind for s in made.sites_of(b)) for b in range(made.layout.blocks)}
        if len(kinds) == 1 and (only := next(iter(kinds))) in known:
            return only
        listed = " or ".join(" + ".join(k) for k in known)
        raise ValueError(f"{self.name} has blocks of {listed}, here they are {sorted(kinds)}")


class Found:
    """The tensors of one family in a state dict, by their row and number.

    Args:
        family: whose table is used.
        tensors: the state dict; only the shapes and values of the family's own keys are looked at.
        prefix: only keys that begin with it are looked at.
    """

    def __init__(self, family: Family, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self.family, self.tensors = family, tensors
        self.keys: dict[tuple[str, int | None], str] = {}
        """Key of each (row's name, number)."""
        self.prefixes: dict[str, set[str]] = {}
        """For each container: what was found in its place."""
        self.used: list[str] = []
        self.paths: list[str] = []
        """Paths of the modules, where they are numbered by their order."""
        self.all_keys = keys = [key for key in tensors if key.startswith(prefix)]
        aside = re.compile(family.aside or r"(?!)")
        matches = [m for row in family.rows for m in _matches(row, keys) if not aside.search(m.key)]
        if family.numbered_modules:
            # a leaf such as a norm's may be another module's as well: a module is one with a key of the namespace
            owners = {m.prefix for m in matches if re.search(family.namespace, m.key)}
            self.paths = sorted(owners, key=_numbers)
            numbers = {path: number for number, path in enumerate(self.paths)}
            matches = [m._replace(prefix="", number=numbers[m.prefix]) for m in matches if m.prefix in owners]
        for row, found, number, key, _ in matches:
            self.prefixes.setdefault(row.container, set()).add(found)
            if (row.name, number) in self.keys and len(self.prefixes[row.container]) == 1:
                other = self.keys[row.name, number]
                raise ValueError(f"{family.name}: {other} and {key} are two spellings of one tensor")
            self.keys[row.name, number] = key
        self.spelling = max((m.spelling for m in matches if m.row.also), default=0)
        """Which spelling messages use: another than the first if there is any of it."""
        self.own = [key for key in keys if re.search(family.namespace, key) and not aside.search(key)]
        """Every key of the method's own namespace."""
        taken = {m.key for m in matches}
        self.strange = [key for key in self.own if key not in taken]
        """Keys of the namespace that no row knows."""

    def count(self, *names: str) -> int:
        """How many layers the rows `names`, or all rows, speak of."""
        numbers = [i for name, i in self.keys if i is not None and (not names or name in names)]
        return max(numbers, default=-1) + 1

    def has(self, name: str, i: int | None = None) -> bool:
        """Whether the tensor is there."""
        return (name, i) in self.keys

    def size(self, name: str, i: int | None = None, *, dim: int = 0) -> int:
        """How large a tensor is along one dimension."""
        self.require([name], [i])
        shape = self.tensors[self.keys[name, i]].shape
        if dim >= len(shape):
            raise ValueError(
                f"{self.family.name}: {self.keys[name, i]} has shape {tuple(shape)}, expected more dimensions"
            )
        return shape[dim]

    def spell(self, name: str, i: int | None = None) -> str:
        """How the tensor is, or would be, called here."""
        if (name, i) in self.keys:
            return self.keys[name, i]
        if self.paths and i is not None:
            return self.paths[i] + name
        row = next(row for row in self.family.rows if row.name == name)
        found = self.prefixes.get(row.container)
        spelt = (row.name, *row.also)[min(self.spelling, len(row.also))]
        return (row.container if not found else min(found)) + spelt.replace("{i}", str(i))

    def check_prefixes(self) -> None:
        """Refuse a state dict with several models in it."""
        for container, found in self.prefixes.items():
            if len(found) > 1:
                row = next(row for row in self.family.rows if row.container == container)
                listed = ", ".join(repr(p) for p in sorted(found))
                raise ValueError(
                    f"{self.family.name}: names like {row.original} are there under several prefixes, {listed}; "
                    "give prefix= to pick one"
                )

    def require(self, names: Sequence[str], numbers: Sequence[int | None] = (None,)) -> None:
        """Refuse a state dict without some of these, naming them all."""
        missing = [self.spell(name, i) for i in numbers for name in names if not self.has(name, i)]
        if missing:
            strange = f"; nothing takes {_listed(self.strange)}" if self.strange else ""
            raise ValueError(f"{self.family.name}: missing {_listed(missing)}{strange}")

    def take(self, name: str, i: int | None = None, *, shape: Sequence[int | None]) -> Tensor:
        """A tensor, its shape checked; None in a shape is any size."""
        self.require([name], [i])
        key = self.keys[name, i]
        tensor = self.tensors[key]
        have = tuple(tensor.shape)
        fits = len(have) == len(shape) and all(w in (None, h) for h, w in zip(have, shape, strict=True))
        if not fits:
            want = str(tuple("any" if w is None else w for w in shape)).replace("'", "")
            raise ValueError(f"{self.family.name}: {key} has shape {have}, expected {want}")
        self.used.append(key)
        return tensor.detach()

    def finish(self) -> tuple[str, ...]:
        """The keys consumed; refuses a state dict that has more of the method's own."""
        left = [key for key in self.own if key not in self.used]
        if left:
            raise ValueError(f"{self.family.name}: nothing takes {_listed(left)}")
        return tuple(self.used)


class Match(NamedTuple):
    """A key that a row takes, what stands before the row's name in it, its number, and which spelling it is in."""

    row: Row
    prefix: str
    number: int | None
    key: str
    spelling: int


def _matches(row: Row, keys: Sequence[str]) -> Iterator[Match]:
    for spelling, name in enumerate((row.name, *row.also)):
        pattern = re.compile(r"((?:.+\.)?)" + re.escape(name).replace(r"\{i\}", r"(\d+)"))
        tail = name.rpartition("{i}")[2]  # spares most of the keys of a large model the regular expression
        for key in keys:
            if key.endswith(tail) and (match := pattern.fullmatch(key)):
                groups = match.groups()
                yield Match(row, groups[0], int(groups[1]) if len(groups) > 1 else None, key, spelling)


def _numbers(path: str) -> list[int]:
    return [int(part) for part in path.split(".") if part.isdigit()]


def _listed(names: Sequence[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
