"""Mistyped values are refused where they are given: a ValueError with the value in it, for every option there is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import twoaxis
from twoaxis.base.options import Count, Options, Share, check_types, from_fields, parse_integer, read_fields
from twoaxis.depth.registry import STREAMS
from twoaxis.depth.site import Site
from twoaxis.depth.walk import apply_nothing
from twoaxis.sequence.registry import MIXERS

WRONG: dict[str, tuple[object, ...]] = {
    "int": (True, "3", 2.5, [1], float("inf"), torch.tensor(3)),
    "float": (True, "3", [1], float("nan"), float("inf"), torch.tensor(3.0)),
    "bool": (1, 0, "yes", 2.5),
    "str": (True, 3, ["A"]),
    "Literal": (True, "nonsense", 2.5, [1]),
}
FIELDS = [
    (registry, name, field.name, str(field.type))
    for registry in (STREAMS, MIXERS)
    for name in registry.names()
    for field in dataclasses.fields(registry.find(name).Config)  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(("registry", "name", "field", "kind"), FIELDS, ids=[f"{f[1]}.{f[2]}" for f in FIELDS])
def test_every_option_refuses_other_types(registry: Any, name: str, field: str, kind: str) -> None:
    kind = re.sub(
        r"Count|Annotated\[int.*\]", "int", re.sub(r"NotNegative|Positive|Annotated\[float.*\]", "float", kind)
    )
    kind = re.sub(r"^(Start|Form)", "Literal", kind)  # names of such types
    found = [values for word, values in WRONG.items() if kind.startswith(word)]
    assert found, f"{name}.{field}: nothing is known to be wrong for {kind}"
    for value in (*found[0], *(() if "None" in kind else (None,))):
        for make in (lambda given: registry.config(name, given), lambda given: registry.find(name).Config(**given)):
            with pytest.raises(ValueError, match=re.escape(repr(value))):
                make({field: value})


@dataclass(frozen=True, kw_only=True)
class Strange:
    size: int = 1
    form: Literal["a", "b"] | None = None
    windows: tuple[int | None, ...] | None = None
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


def test_a_strangers_options_are_checked_before_they_are_compared() -> None:
    with pytest.raises(ValueError, match="size must be an integer, got '3'"):
        from_fields(Strange, {"size": "3"}, "strange")
    with pytest.raises(
        ValueError, match=r"windows must be a tuple \(each an integer or None\) or None, got \(1, 2\.5\)"
    ):
        check_types(Strange(windows=(1, 2.5)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown form 'c'.*it is one of a, b"):
        check_types(Strange(form="c"))  # type: ignore[arg-type]
    check_types(Strange(size=2, form="a", windows=(1, None), share=1))

    class Local:
        pass

    @dataclass(frozen=True, kw_only=True)
    class Hidden:
        size: Local | None = None

    check_types(Hidden(size=3))  # type: ignore[arg-type]  # an annotation that cannot be evaluated passes


@dataclass(frozen=True, kw_only=True)
class Bounded(Options):
    size: Count | None = None
    part: Share = 0.5
    windows: tuple[Count | None, ...] = ()
    table: dict[str, Any] = dataclasses.field(default_factory=dict)

    def validate(self) -> None:
        if self.size == 7:
            raise ValueError("size 7 is taken")


def test_bounds_stand_in_the_annotation(tmp_path: Path) -> None:
    for values, message in (
        ({"size": 0}, "^size must be at least 1, got 0$"),
        ({"part": 1.5}, "^part must lie between 0 and 1, got 1.5$"),
        ({"windows": [3, 0]}, "^windows must be at least 1, got 0$"),
        ({"size": 10**400}, "^size must be at most 9223372036854775807, got an integer of .* digits or more$"),
        ({"size": 7}, "^size 7 is taken$"),
        ({"siez": 1}, r"^Bounded has no option 'siez' \(did you mean 'size'\?\); its options are size, part"),
        ({"table": 3}, "^table must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Bounded.from_dict(values)
    given = Bounded(size=3, windows=(1, None), table={"a": [1]})
    assert Bounded.from_dict(given.to_dict()) == given
    for name, text in (("x.ini", ""), ("x.json", "[" * 100_000), ("x.toml", "a ="), ("x.yaml", "a: [")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            read_fields(tmp_path / name)


def test_integers_as_people_write_them() -> None:
    assert [parse_integer(text) for text in ("500", "1e6", "300k", "2M", "1.5B", "10_000", "-3")] == [
        *(500, 1_000_000, 300_000, 2_000_000, 1_500_000_000, 10_000, -3)
    ]
    for text in ("", "k", "1.5", "ten", "1e400", "9" * 400, "nan", "2MM"):
        with pytest.raises(ValueError, match="expected an integer such as 500, 300k or 2M"):
            parse_integer(text)


STREAM: Any = twoaxis.stream("attention_residuals", blocks=2, width=8, block_size=2)
X = torch.randn(2, 3, 8)
Q: Any = torch.randn(2, 5, 4, 8)
LOOSE: Any = twoaxis  # a caller without a type checker
WIDE: dict[str, Any] = {"blocks": 2, "width": 8}


def written(y: Any) -> Any:
    state = STREAM.open(X)
    seen = STREAM.read(state, STREAM.sites[0])
    return STREAM.write(state, STREAM.sites[0], y, seen, seen)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LOOSE.stream("standard", blocks=True, width=8), "blocks must be a positive integer, got True"),
        (lambda: LOOSE.stream("standard", blocks=2, width=True), "width must be a positive integer, got True"),
        (lambda: LOOSE.stream("standard", blend="yes", **WIDE), "blend must be True or False, got 'yes'"),
        (lambda: LOOSE.stream("standard", kinds="mlp", **WIDE), "kinds must be a sequence .* got 'mlp'"),
        (lambda: LOOSE.stream("standard", kinds=(), **WIDE), r"kinds must be a sequence .* got \(\)"),
        (lambda: LOOSE.stream("standard", kinds=3, **WIDE), "kinds must be a sequence .* got 3"),
        (lambda: LOOSE.stream("standard", placement=3, **WIDE), "cannot read the placement 3"),
        (lambda: LOOSE.stream("standard", placement="", **WIDE), "cannot read the placement ''"),
        (lambda: LOOSE.stream("standard", placement="1-0", **WIDE), "cannot read the placement '1-0'"),
        (lambda: LOOSE.stream("standard", placement={"blocks": 1}, **WIDE), "blocks must be a tuple"),
        (lambda: LOOSE.stream(3, **WIDE), "unknown stream 3; the streams are standard"),
        (lambda: LOOSE.ModelConfig(num_hidden_layers=True), "num_hidden_layers must be an integer, got True"),
        (lambda: LOOSE.ModelConfig(rms_norm_eps=-1.0), "rms_norm_eps must not be negative, got -1.0"),
        (lambda: LOOSE.ModelConfig(rope_theta=0.0), "rope_theta must be positive, got 0.0"),
        (lambda: LOOSE.ModelConfig(stream_options=[1]), "stream_options must be"),
        (lambda: LOOSE.ShortSWA(True), "channels must be a positive integer, got True"),
        (lambda: LOOSE.ShortSWA(8)(X[0]), r"shape \(3, 8\), short_swa needs \(batch, time, 8\)"),
        (lambda: LOOSE.window_attention(Q, Q, Q, True, 1), "window must be a positive integer .* got True"),
        (lambda: LOOSE.window_attention(Q, Q, Q, 2, "1"), "axis must be an integer, got '1'"),
        (lambda: LOOSE.window_attention(Q, Q, None, 2, 1), "must be tensors, got Tensor, Tensor, NoneType"),
        (lambda: LOOSE.window_attention(Q, Q, Q, 2, 1, sink=torch.zeros(3)), r"\(4,\), got \(3,\)"),
        (lambda: LOOSE.window_attention(Q, Q, Q, 2, 1, bias=torch.zeros(3, 3)), r"\(3, 3\).*\(2, 4, 5, 5\)"),
        (lambda: LOOSE.window_attention(Q, Q, Q, 2, 1, reach=torch.zeros(2, 4).long()), r"\(2, 4\).*\(2, 5\)"),
        (lambda: LOOSE.Ring("3", 1).append(Q), "window must be a positive integer .* got '3'"),
        (lambda: LOOSE.Ring(3, 9).append(Q), r"along axis 9 .* got dimensions \[4\]"),
        (lambda: STREAM.open(X.long()), "floating-point tensor .* got torch.int64"),
        (lambda: STREAM.open(None), "floating-point tensor .* got NoneType"),
        (lambda: STREAM.read(STREAM.open(X), 0), "one of the stream's 5 sites, got 0"),
        (lambda: STREAM.read(STREAM.open(X), Site(9, "mlp", 99, True, True)), "none of the stream's 5 sites"),
        (lambda: STREAM.pack(None), "a state comes from the stream's open, write or unpack, got NoneType"),
        (lambda: STREAM.unpack((X,) * 5, STREAM.sites[2]), "before block 1 packs into 2 tensors, got 5"),
        (lambda: written(None), "attention of block 0.* returned NoneType, not a tensor of width 8"),
        (lambda: written(X[:1]), r"returned shape \(1, 3, 8\), its read has \(2, 3, 8\)"),
        (lambda: LOOSE.compose("standard", []), "compose needs a stream"),
        (lambda: LOOSE.compose(STREAM, [("mlp", None)]), "sub-layer 0 must be"),
    ],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_chunk_of_no_tokens_is_a_chunk() -> None:
    assert twoaxis.window_attention(Q[:, :0], Q[:, :0], Q[:, :0], axis=1).shape == (2, 0, 4, 8)


@pytest.mark.parametrize("name", twoaxis.stream_names())
def test_a_twin_is_another_stream(name: str) -> None:
    options = STREAMS.find(name).variants[0]
    one, other = (twoaxis.stream(name, **WIDE, **options) for _ in range(2))
    with pytest.raises(ValueError, match="belongs to another stream"):
        other.read(one.open(X), other.sites[0])


@pytest.mark.parametrize("name", twoaxis.stream_names())
def test_a_wrong_number_of_packed_tensors_is_refused(name: str) -> None:
    for options in STREAMS.find(name).variants:
        stream = twoaxis.stream(name, blocks=3, width=8, **options)
        state = stream.open(X)
        for site in stream.sites:
            if site.first:
                packed = stream.pack(state)
                for tensors in (packed[:-1], (*packed, X)):
                    with pytest.raises(ValueError, match=f"packs into {len(packed)} tensors, got {len(tensors)}"):
                        stream.unpack(tensors, site)
            seen = stream.read(state, site)
            c, y = apply_nothing(stream, seen, seen.x)
            state = stream.write(state, site, y, seen, c)
