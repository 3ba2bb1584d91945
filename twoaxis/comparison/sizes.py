"""The shapes at which a comparison runs its contenders, as `--sizes` spells them.

    nano,tiny                                      presets
    width=64:blocks=2,width=96:blocks=3            changes of the comparison's preset
    tiny:blocks=8:tokens=4000000                   both, with a budget of its own

Commas stand between sizes, colons between the parts of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twoaxis.base.spec import parse_value, split

SHORT = {
    "width": "hidden_size",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
}
"""Short names of a size's fields."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A shape at which every contender is run."""

    label: str
    """What tables call it; also its folder."""
    preset: str
    """The shape it starts from."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of `TwoAxisConfig` that replace the preset's."""
    steps: int | None = None
    """Its own number of steps; None is the comparison's."""
    tokens: int | None = None
    """Its own number of tokens; None is the comparison's."""


def parse_sizes(text: str, preset: str) -> tuple[Size, ...]:
    """Sizes from their spelling, see above.

    A part is a preset's name, a field of `TwoAxisConfig` or its short name (width, blocks, heads, kv_heads, hidden),
    or steps or tokens. A changed width keeps the width of a head and makes the MLP 8/3 as wide, unless these are given.

    Args:
        text: as above.
        preset: where changes start when a size names none.
    """
    sizes = []
    for spelled in split(text):
        start, fields, budget = preset, {}, {}
        for number, part in enumerate(spelled.strip().split(":")):
            name, equals, value = part.partition("=")
            name = name.strip()
            if not equals and number == 0:
                start = name
            elif not equals:
                raise ValueError(f"{part!r} in the size {spelled!r} is no change; write preset:field=value:field=value")
            elif name in ("steps", "tokens"):
                budget[name] = parse_value(value)
                if not isinstance(budget[name], int) or isinstance(budget[name], bool) or budget[name] < 1:
                    raise ValueError(f"{name} of the size {spelled!r} must be a positive integer, got {value!r}")
            else:
                fields[SHORT.get(name, name)] = parse_value(value)
        if len(budget) > 1:
            raise ValueError(f"the size {spelled!r} gives both steps and tokens; give one of them")
        sizes.append(Size(label=spelled.strip(), preset=start, model=_shaped(spelled, start, fields), **budget))
    return tuple(sizes)


def _shaped(spelled: str, preset: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Heads and MLP that follow a changed width."""
    from twoaxis.model.presets import preset_fields

    shape = preset_fields(preset)
    width = fields.get("hidden_size")
    if not isinstance(width, int) or width == shape["hidden_size"]:
        return fields
    if "num_attention_heads" not in fields and "head_dim" not in fields:
        head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        if width % head:
            raise ValueError(
                f"the size {spelled!r}: heads of {head} channels, as {preset} has them, do not divide the width "
                f"{width}; give heads=N, or a multiple of {head}"
            )
        fields = fields | {"num_attention_heads": width // head}
        kv = shape.get("num_key_value_heads")
        if kv is not None and "num_key_value_heads" not in fields and (width // head) % kv:
            raise ValueError(
                f"the size {spelled!r} has {width // head} heads for {kv} of key and value; give kv_heads=N"
            )
    return {"intermediate_size": None} | fields
