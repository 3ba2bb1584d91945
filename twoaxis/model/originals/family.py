"""A family of foreign checkpoints: its table, and reading and writing derived from it.

    read     keys ─► letters from shapes ─► our parameters, stacked ─► options from letters and settings ─► fits?
    write    our parameters ─► rows ─► their names and shapes, settings from options ─► read back: the same stream?

A key of the method's own that is missing, left over or of another shape is an error, because a checkpoint that loads
only in part is one that runs and is wrong. What an original does not have needs no list: a stream whose options do not
survive the way there and back is refused.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from twoaxis.depth.registry import STREAMS, stream
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.keys import Keys, listed
from twoaxis.model.originals.table import REQUIRED, Row, Setting, evaluate, fill

Kinds = Sequence[str] | Sequence[Sequence[str]]
BLOCK = ("attention", "mlp")


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

    def build(self, *, width: int | None = None, kinds: Kinds | None = None, blocks: int | None = None) -> Stream:
        """The stream with the parameters loaded, in float32 at least.

        Args:
            width: needed where the original's tensors do not tell it.
            kinds: sub-layers of a block, where they are not those of the original.
            blocks: number of blocks, where they are not those of the original.
        """
        if width is not None and self.width not in (None, width):
            raise ValueError(f"the {self.family} checkpoint has width {self.width}, got width={width}")
        width = width or self.width
        if width is None:
            raise ValueError(f"{self.family} tensors do not tell the width of the model: give width=")
        given = self._replace(width=width, kinds=kinds or self.kinds, blocks=blocks or self.blocks)
        dtype = torch.float32
        for tensor in self.state.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        made = given.empty().to(dtype)
        self.fit(made)
        made.load_state_dict(self.state)
        return made

    def empty(self) -> Stream:
        """The stream with its initial values."""
        kinds, width = self.kinds, self.width or 1
        return stream(self.stream, blocks=self.blocks, width=width, kinds=kinds, **self.options)

    def fit(self, made: Stream) -> None:
        """Refuse a stream that these tensors do not fill exactly."""
        want = {name: tuple(t.shape) for name, t in made.state_dict().items()}
        have = {name: tuple(t.shape) for name, t in self.state.items()}
        for name in sorted({*want, *have}):
            if want.get(name) != have.get(name):
                raise ValueError(
                    f"the {self.family} tensors do not fit {self.stream} with {self.options}: "
                    f"{name} is {have.get(name, 'absent')} instead of {want.get(name, 'absent')}"
                )


class Reading:
    """A checkpoint as far as it is read: what a family's own functions look at.

    Args:
        family: whose names and settings these are.
        keys: the tensors found.
        config: the original's configuration, whole or in part: a mapping, or an object such as transformers' with
            `to_dict`; fields of no concern to the stream are passed over.
        overrides: options of our stream that the caller sets.
    """

    def __init__(self, family: Family, keys: Keys, config: Any, overrides: Mapping[str, Any]) -> None:
        fields = config.to_dict() if hasattr(config, "to_dict") else ({} if config is None else config)
        if not isinstance(fields, Mapping):
            raise ValueError(f"a configuration is a mapping or has to_dict, got {type(config).__name__}")
        nested = fields.get("text_config")  # where a model with a vision tower keeps its decoder's
        self.fields = {**nested, **fields} if isinstance(nested, Mapping) else dict(fields)
        self.family, self.keys, self.overrides = family, keys, overrides
        self.forms = {row.form for row in family.rows if not row.form or keys.of(row)}
        """The variants that are there."""
        self.letters: dict[str, int] = {"L": keys.count} if keys.count else {}
        """The sizes found."""
        self.each: defaultdict[int | None, dict[str, int]] = defaultdict(dict)
        """The sizes that differ from layer to layer."""

    def setting(self, name: str) -> Any:
        """A field of the configuration, or the original's default."""
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

    def place(self) -> dict[str, dict[int | None, Tensor]]:
        """The tensors by our parameters and their entries, every shape checked."""
        placed: dict[str, dict[int | None, Tensor]] = defaultdict(dict)
        missing: list[str] = []
        defaults: list[tuple[Row, float]] = []
        for row in self.family.rows:
            for i in row.numbers(self.letters) if row.form in self.forms else ():
                if (row, i) not in self.keys.found:
                    if row.absent is None:
                        missing.append(self.keys.spell(row, i))
                    else:
                        defaults.append((row, row.absent))
                    continue
                tensor = self._take(row, i)
                name, entry = row.place({**self.letters, **({} if i is None else {"i": i})})
                if entry in placed[name]:
                    raise ValueError(f"{self.family.name}: {self.keys.spell(row, i)} and another are both {row.ours}")
                placed[name][entry] = row.view.read(tensor.detach())
        if missing:
            strange = f"; nothing takes {listed(self.keys.strange)}" if self.keys.strange else ""
            raise ValueError(f"{self.family.name}: missing {listed(missing)}{strange}")
        for row, value in defaults:
            placed[row.ours][None] = torch.full([evaluate(d, self.letters) for d in row.dims], value)
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


class Family:
    """One original's names: tables, and what tables cannot say in the functions that follow them."""

    name: ClassVar[str]
    """What `read_stream(like=)` takes."""
    stream: ClassVar[str]
    """Our stream."""
    rows: ClassVar[tuple[Row, ...]]
    """The tensors; the family is recognised by the name and the number of dimensions of the first."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    sizes: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Letters of the shapes, and the options that they are."""
    each: ClassVar[str] = ""
    """Letters that stand for another size in each layer."""
    layers: ClassVar[str] = ""
    """What the list of layers is called; a checkpoint may call it otherwise."""
    namespace: ClassVar[str]
    """A regular expression: keys that are the method's own."""
    aside: ClassVar[str] = r"(?!)"
    """A regular expression: keys that look like the method's own but belong to another part of the model."""
    kinds: ClassVar[tuple[tuple[str, ...], ...]] = (BLOCK,)
    """The sub-layers that its blocks may have; empty: any."""
    beyond: ClassVar[tuple[str, ...]] = ()
    """Options that no original has to know: how something is computed, and where it once began."""
    numbered_modules: ClassVar[bool] = False
    """Whether modules lie anywhere and are numbered by the order of the numbers in their paths."""
    recognised: ClassVar[bool] = True
    """Whether names alone tell the family."""
    writes: ClassVar[bool] = True
    """Whether there is a way back."""

    def find(self, reading: Reading) -> dict[str, int]:
        """Letters that no shape tells by itself."""
        return {}

    def options(self, reading: Reading) -> dict[str, Any]:
        """Options beyond the sizes and the settings that are copied; refuses what there is no counterpart for."""
        return {}

    def layout(self, reading: Reading) -> tuple[int, Kinds]:
        """Number of blocks, and their sub-layers."""
        return reading.letters["L"], BLOCK

    def unused(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Parameters that the original keeps without using them."""
        return ()

    def forms(self, made: Stream) -> set[str]:
        """The forms in which a stream is written."""
        return set()

    def letters(self, made: Stream) -> dict[str, int]:
        """The sizes of a stream."""
        sizes = {letter: getattr(made.config, option) for letter, option in self.sizes}
        return {"L": made.layout.blocks, "D": made.layout.width, **sizes}

    def translate(self, made: Stream) -> dict[str, Any]:
        """The settings that are not copied."""
        return {}

    def detect(self, keys: Keys) -> bool:
        """Whether these are its names."""
        first = self.rows[0]
        return self.recognised and any(t.dim() == len(first.dims) for t in keys.of(first).values())

    def read(self, keys: Keys, config: Any, overrides: Mapping[str, Any]) -> ReadStream:
        """Our stream from the tensors found."""
        keys.check()
        reading = Reading(self, keys, config, overrides)
        reading.letters |= self.find(reading)
        placed = reading.place()
        used = {key for (row, i), key in keys.found.items() if i in row.numbers(reading.letters)}
        if left := [key for key in keys.own if key not in used]:
            raise ValueError(f"{self.name}: nothing takes {listed(left)}")
        options = {option: reading.letters[letter] for letter, option in self.sizes if letter in reading.letters}
        for setting in self.settings:
            if setting.copied and (value := reading.setting(setting.name)) is not None:
                options = {
                    option: value * setting.times if setting.times > 1 else value for option in setting.options
                } | options
        options |= self.options(reading)
        for setting in self.settings:
            if setting.copied and setting.default is None:
                reading.agree(setting.name, options[setting.ours])
        options |= overrides
        STREAMS.config(self.stream, options)
        blocks, kinds = self.layout(reading)
        norms = {name.removeprefix("norms."): t[None] for name, t in placed.items() if name.startswith("norms.")}
        width, consumed = reading.letters.get("D"), tuple(keys.found[at] for at in keys.found if keys.found[at] in used)
        found = ReadStream(self.stream, options, {}, self.name, blocks, width, kinds, norms, consumed)
        with torch.device("meta"):
            made = found.empty()
        want = made.state_dict()
        for name, entries in placed.items():
            if name.startswith("norms.") or name in self.unused(options):
                continue
            shape = want[name].shape if name in want else None
            tensors = [entries[entry] for entry in sorted(entries, key=lambda entry: entry or 0)]
            stacked = None not in entries
            tensors = [_reshaped(t, None if shape is None else shape[1:] if stacked else shape) for t in tensors]
            found.state[name] = torch.stack(tensors) if stacked else tensors[0].contiguous()
        found.fit(made)
        return found

    def write(self, made: Stream) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A stream under the original's names, and the settings that go with it."""
        self._refuse_layout(made)
        letters, forms, ours = self.letters(made), self.forms(made), made.state_dict()
        tensors: dict[str, Tensor] = {}
        written: set[str] = set()
        for row in self.rows:
            if row.ours.startswith("norms.") or row.form not in {"", *forms}:
                continue
            for i in row.numbers(letters):
                scope = letters if i is None else {**letters, "i": i}
                name, entry = row.place(scope)
                if name not in ours and row.absent is None:
                    raise ValueError(f"{self.name} has {row.theirs}; {_said(made)} has no {name}")
                if name in ours:
                    tensor = row.view.write(ours[name] if entry is None else ours[name][entry])
                    known = all(letter not in dim for letter in self.each for dim in row.dims)
                    shape = [evaluate(dim, scope) for dim in row.dims] if known else None
                    tensors[fill(row.theirs, scope)] = _reshaped(tensor, shape)
                    written.add(name)
        if left := [name for name in ours if name not in written]:
            raise ValueError(f"{self.name} has no {left[0]}, {_said(made)} has")
        settings = self.translate(made)
        for setting in self.settings:
            if setting.copied:
                value = getattr(made.config, setting.options[0])
                if setting.times > 1 and value % setting.times:
                    raise ValueError(f"{self.name} has no {setting.ours}={value}, only multiples of {setting.times}")
                settings[setting.name] = value // setting.times if setting.times > 1 else value
        self._refuse_options(made, tensors, settings)
        return tensors, settings

    def _refuse_layout(self, made: Stream) -> None:
        kinds = {tuple(s.kind for s in made.sites_of(b)) for b in range(made.layout.blocks)}
        if self.kinds and not (len(kinds) == 1 and kinds <= set(self.kinds)):
            listed = " or ".join(" + ".join(k) for k in self.kinds)
            raise ValueError(f"{self.name} has blocks of {listed}, here they are {sorted(kinds)}")
        idle = next((s for s in made.layout.sites if not made.uses(s)), None)
        if idle is not None:
            raise ValueError(
                f"{self.name} uses its method everywhere; here the {idle.kind} site of block {idle.block} does not"
            )

    def _refuse_options(self, made: Stream, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Refuse a stream whose options would not come back."""
        blank = {name: tensor.to("meta") for name, tensor in tensors.items()}
        again = STREAMS.config(self.stream, self.read(Keys(self, blank), settings, {}).options)
        for field in dataclasses.fields(made.config):
            have, only = getattr(made.config, field.name), getattr(again, field.name)
            if field.name not in self.beyond and have != only:
                raise ValueError(f"{self.name} has no {field.name}={have!r}, only {only!r}")


def _reshaped(tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    """The tensor in `shape` if it has as many numbers; what does not fit is named where all shapes are known."""
    if shape is None or tensor.numel() != torch.Size(shape).numel():
        return tensor
    return tensor.reshape(tuple(shape))


def _said(made: Stream) -> str:
    """A stream with the options that are not the defaults."""
    plain = STREAMS.config(made.name, {})
    names = [field.name for field in dataclasses.fields(plain)]
    said = [f"{n}={getattr(made.config, n)!r}" for n in names if getattr(made.config, n) != getattr(plain, n)]
    return f"{made.name} with {', '.join(said) or 'its defaults'}"
