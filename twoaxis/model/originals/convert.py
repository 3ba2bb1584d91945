"""Reading a foreign checkpoint and writing one, both derived from the family's table.

    read     keys ─► letters from shapes ─► our parameters, stacked ─► options from letters and settings ─► fits?
    write    our parameters ─► rows ─► their names and shapes, settings from options ─► read back: the same stream?

A key of the method's own that is missing, left over or of another shape is an error, because a checkpoint that loads
only in part is one that runs and is wrong. A prefix is found, not assumed, and has to be the same for all rows that
share a container; what the list of Transformer layers is called is part of it:

    model.layers.1.mlp_res_proj.weight
    └─ prefix ──┘│ └─ name in the table, from the number on
                 └─ i
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.options import between, check_type
from twoaxis.depth.registry import STREAMS, stream
from twoaxis.depth.site import MOST_BLOCKS
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.table import BLOCK, REQUIRED, Family, Kinds, Row, evaluate, fill, names

Size = Annotated[int, between(1, MOST_BLOCKS)]
"""Of blocks and what is counted in them, of streams and ranks."""


class ReadStream(NamedTuple):
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

    def build(self, *, width: int | None = None, kinds: Kinds | None = None) -> Stream:
        """The stream with the parameters loaded, in float32 at least.

        Args:
            width: needed where the original's tensors do not tell it.
            kinds: sub-layers of a block, where they are not those of the original.
        """
        if width is not None and self.width not in (None, width):
            raise ValueError(f"the {self.family} checkpoint has width {self.width}, got width={width}")
        if (width := width or self.width) is None:
            raise ValueError(f"{self.family} tensors do not tell the width of the model: give width=")
        dtype = torch.float32
        for tensor in self.state.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        made = self._replace(width=width, kinds=kinds or self.kinds).empty().to(dtype)
        self.fit(made)
        made.load_state_dict(self.state)
        return made

    def empty(self) -> Stream:
        """The stream with its initial values."""
        return stream(self.stream, blocks=self.blocks, width=self.width or 1, kinds=self.kinds, **self.options)

    def fit(self, made: Stream) -> None:
        """Refuse a stream that these tensors do not fill exactly."""
        want, have = ({name: tuple(t.shape) for name, t in d.items()} for d in (made.state_dict(), self.state))
        for name in sorted({*want, *have}):
            if want.get(name) != have.get(name):
                raise ValueError(
                    f"the {self.family} tensors do not fit {self.stream} with {self.options}: "
                    f"{name} is {have.get(name, 'absent')} instead of {want.get(name, 'absent')}"
                )


class Match(NamedTuple):
    """A key that a row takes, what stands before the row's name in it, its number, and which spelling it is in."""

    row: Row
    prefix: str
    number: int | None
    key: str
    spelling: int


class Keys:
    """The tensors of one family in a state dict, by their row and number; others are not looked at.

    Args:
        family: whose table is used.
        tensors: the state dict.
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

    @property
    def recognised(self) -> bool:
        """Whether these are the family's names."""
        first = self.family.rows[0]
        fixed = {place: int(dim) for place, dim in enumerate(first.dims) if dim.isdecimal()}
        return self.family.recognised and any(
            t.dim() == len(first.dims) and all(t.shape[place] == size for place, size in fixed.items())
            for t in self.of(first).values()
        )

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
        if not self.found:
            first = self.family.rows[0].theirs
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
                    prefix, *number = match.groups()
                    yield Match(row, prefix, int(number[0]) if number else None, key, spelling)


class Reading:
    """A checkpoint as far as it is read: what a family's own functions look at.

    Args:
        keys: the tensors found.
        config: the original's configuration, whole or in part: a mapping, or an object such as transformers' with
            `to_dict`; fields of no concern to the stream are passed over.
        overrides: options of our stream that the caller sets.
    """

    def __init__(self, keys: Keys, config: Any, overrides: Mapping[str, Any]) -> None:
        fields = config.to_dict() if hasattr(config, "to_dict") else ({} if config is None else config)
        if not isinstance(fields, Mapping):
            raise ValueError(f"a configuration is a mapping or has to_dict, got {type(config).__name__}")
        nested = fields.get("text_config")  # where a model with a vision tower keeps its decoder's
        self.fields = {**nested, **fields} if isinstance(nested, Mapping) else dict(fields)
        self.family, self.keys, self.overrides = keys.family, keys, overrides
        self.forms = {row.form: row.option for row in self.family.rows if not row.form or keys.of(row)}
        """The variants that are there, with the options that they are."""
        count = keys.count
        self.letters = ({"L": count} if count else {}) | ({"S": count} if self.family.numbered_modules else {})
        """The sizes found."""
        self.each: defaultdict[int | None, dict[str, int]] = defaultdict(dict)
        """The sizes that differ from layer to layer."""
        if self.family.find:
            self.letters |= self.family.find(self)

    def setting(self, name: str) -> Any:
        """A field of the configuration, or the original's default."""
        setting = next(s for s in self.family.settings if s.name == name)
        given = self.fields.get(name)
        if given is None and setting.default is REQUIRED:
            raise ValueError(
                f"{self.family.name}: its tensors do not tell {name} ({setting.note}); give config={{{name!r}: ...}} "
                "or the original's whole configuration"
            )
        if given is None:
            return setting.default
        if setting.default in (None, REQUIRED) or type(setting.default) is int:  # a size, which shapes are computed of
            check_type(f"{self.family.name}: {name}", given, Size)
        return given

    def agree(self, name: str, found: Any) -> None:
        """Refuse a configuration that says something else than the tensors."""
        given = self.fields.get(name)
        if given is not None and given != found:
            raise ValueError(f"{self.family.name}: the configuration has {name}={given}, the tensors {found}")

    def place(self) -> dict[str, dict[int | None, Tensor]]:
        """The tensors by our parameters and their entries, every shape checked."""
        placed: dict[str, dict[int | None, Tensor]] = defaultdict(dict)
        missing: dict[tuple[str, int | None], str] = {}
        used, absent = set[str](), list[tuple[Row, float]]()
        for row in self.family.rows:
            for i, scope in row.scopes(self.letters) if row.form in self.forms else ():
                name, entry = row.place(scope)
                if (row, i) in self.keys.found:
                    tensor = self._take(row, i)
                    if entry in placed[name]:
                        spelt = self.keys.spell(row, i)
                        raise ValueError(f"{self.family.name}: {spelt} and another are both {row.ours}")
                    placed[name][entry] = row.view.read(tensor.detach())
                    used.add(self.keys.found[row, i])
                elif row.absent is not None:
                    absent.append((row, row.absent))
                elif (name, entry) not in missing or self.keys.of(row):
                    missing[name, entry] = self.keys.spell(row, i)
        lost = [key for (name, entry), key in missing.items() if entry not in placed[name]]
        if lost:
            strange = f"; nothing takes {_listed(self.keys.strange)}" if self.keys.strange else ""
            raise ValueError(f"{self.family.name}: missing {_listed(lost)}{strange}")
        if left := [key for key in self.keys.own if key not in used]:
            raise ValueError(f"{self.family.name}: nothing takes {_listed(left)}")
        for row, value in absent:
            placed[row.ours][None] = torch.full([evaluate(d, self.letters) for d in row.dims], value)
        self.consumed = tuple(key for key in self.keys.found.values() if key in used)
        return placed

    def _take(self, row: Row, i: int | None) -> Tensor:
        key = self.keys.found[row, i]
        tensor = self.keys.tensors[key]
        scope = {**self.letters, **self.each[i], **({} if i is None else {"i": i})}
        known = dict(scope)
        if not row.bind(tensor.shape, scope):
            raise ValueError(
                f"{self.family.name}: {key} has shape {tuple(tensor.shape)}, expected {row.expected(known)}"
            )
        for letter in scope.keys() - known.keys():
            (self.each[i] if letter in self.family.each else self.letters)[letter] = scope[letter]
        return tensor

    def options(self) -> dict[str, Any]:
        """Of our stream, those that the caller sets first."""
        family, copied = self.family, [setting for setting in self.family.settings if setting.copied]
        found: dict[str, Any] = dict(family.always)
        for setting in copied:
            if (value := self.setting(setting.name)) is not None:
                found |= dict.fromkeys(setting.options, value * setting.times if setting.times > 1 else value)
        found |= {option: self.letters[letter] for letter, option in family.sizes.items() if letter in self.letters}
        found |= dict(option for option in self.forms.values() if option)
        found |= family.options(self) if family.options else {}
        for setting in copied:
            if setting.default is None:
                self.agree(setting.name, found[setting.ours])
        return found | dict(self.overrides)

    def layout(self) -> tuple[int, Kinds]:
        """Number of blocks, and their sub-layers: attention and MLP in turn, where an odd one stands by itself."""
        if self.family.layout:
            return self.family.layout(self)
        if "S" not in self.letters:
            return self.letters["L"], BLOCK
        pairs, odd = divmod(self.letters["S"], 2)
        return pairs + odd, [*[BLOCK] * pairs, BLOCK[:1]] if odd else BLOCK


def read(keys: Keys, config: Any, overrides: Mapping[str, Any]) -> ReadStream:
    """Our stream from the tensors found."""
    keys.check()
    family, reading = keys.family, Reading(keys, config, overrides)
    placed, options = reading.place(), reading.options()
    STREAMS.config(family.stream, options)
    norms = {name.removeprefix("norms."): t[None] for name, t in placed.items() if name.startswith("norms.")}
    blocks, kinds = reading.layout()
    width = reading.letters.get("D")
    found = ReadStream(family.stream, options, {}, family.name, blocks, width, kinds, norms, reading.consumed)
    with torch.device("meta"):
        made = found.empty()
    want = made.state_dict()
    for name, entries in placed.items():
        if name.startswith("norms.") or name in family.unused(options):
            continue
        stacked = None not in entries
        shape = want[name].shape[stacked:] if name in want else None
        tensors = [_reshaped(entries[at], shape) for at in sorted(entries, key=lambda at: at or 0)]
        found.state[name] = torch.stack(tensors) if stacked else tensors[0].contiguous()
    found.fit(made)
    return found


def write(family: Family, made: Stream) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A stream under the original's names, and the settings that go with it."""
    _refuse_layout(family, made)
    letters = {"L": made.layout.blocks, "S": len(made.sites), "D": made.layout.width}
    letters |= {letter: getattr(made.config, option) for letter, option in family.sizes.items()} | family.letters(made)
    ours, tensors, written = made.state_dict(), dict[str, Tensor](), set[tuple[str, int | None]]()
    for row in family.rows:
        if row.ours.startswith("norms.") or (row.option and getattr(made.config, row.option[0]) != row.option[1]):
            continue
        for _, scope in row.scopes(letters):
            name, entry = row.place(scope)
            if name not in ours and not row.form:
                raise ValueError(f"{family.name} has {row.theirs}; {_said(made)} has no {name}")
            if name in ours and (name, entry) not in written:
                tensor = row.view.write(ours[name] if entry is None else ours[name][entry])
                known = all(names(dim) <= scope.keys() for dim in row.dims)
                shape = [evaluate(dim, scope) for dim in row.dims] if known else None
                tensors[fill(row.theirs, scope)] = _reshaped(tensor, shape)
                written.add((name, entry))
    if left := ours.keys() - {name for name, _ in written}:
        raise ValueError(f"{family.name} has no {min(left)}, {_said(made)} has")
    settings = family.translate(made)
    for setting in family.settings:
        if setting.copied:
            value = getattr(made.config, setting.options[0])
            if setting.times > 1 and value % setting.times:
                raise ValueError(f"{family.name} has no {setting.ours}={value}, only multiples of {setting.times}")
            settings[setting.name] = value // setting.times if setting.times > 1 else value
    blank = {name: tensor.to("meta") for name, tensor in tensors.items()}
    again = STREAMS.config(family.stream, read(Keys(family, blank), settings, {}).options)
    for field in dataclasses.fields(made.config):
        have, only = getattr(made.config, field.name), getattr(again, field.name)
        if field.name not in family.beyond and have != only:
            raise ValueError(f"{family.name} has no {field.name}={have!r}, only {only!r}")
    return tensors, settings


def _refuse_layout(family: Family, made: Stream) -> None:
    kinds = {tuple(s.kind for s in made.sites_of(b)) for b in range(made.layout.blocks)}
    if family.kinds and not (len(kinds) == 1 and kinds <= set(family.kinds)):
        known = " or ".join(" + ".join(k) for k in family.kinds)
        raise ValueError(f"{family.name} has blocks of {known}, here they are {sorted(kinds)}")
    idle = next((s for s in made.layout.sites if not made.uses(s)), None)
    if idle is not None:
        raise ValueError(
            f"{family.name} uses its method everywhere; here the {idle.kind} site of block {idle.block} does not"
        )


def _reshaped(tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    """The tensor in `shape` if it has as many numbers; what does not fit is named where all shapes are known."""
    if shape is None or tensor.numel() != torch.Size(shape).numel():
        return tensor
    return tensor.reshape(tuple(shape))


def _said(made: Stream) -> str:
    """A stream with the options that are not the defaults."""
    plain = vars(STREAMS.config(made.name, {}))
    said = [f"{name}={value!r}" for name, value in vars(made.config).items() if value != plain[name]]
    return f"{made.name} with {', '.join(said) or 'its defaults'}"


def _listed(keys: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    rest = len(keys) - most
    return ", ".join(keys[:most]) + (f" and {rest} more" if rest > 0 else "")
