"""The registry of mixers: one line per mixer, and the function that builds them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twoaxis.base.registry import Registry

if TYPE_CHECKING:
    from twoaxis.sequence.mixer import LocalOperator, Mixer

MIXERS: Registry[LocalOperator] = Registry(
    "mixer",
    {
        "short_swa": "twoaxis.sequence.short_swa:ShortSWA",
        "short_conv": "twoaxis.sequence.short_conv:ShortConv",
        "canon": "twoaxis.sequence.canon:Canon",
        "dynamic_conv": "twoaxis.sequence.dynamic_conv:DynamicConv",
    },
)


def mixer_names() -> tuple[str, ...]:
    """The names `mixer` takes; it takes those that people use too, such as swa and conv."""
    return MIXERS.names()


def mixer(name: str, **options: Any) -> Mixer:
    """A local mixer by name.

        mixer("short_swa", window=16, heads=2, head_width=32)

    Args:
        name: one of `mixer_names()`, or NAME:option=value,... as on the command line.
        **options: the mixer's own; see its Config.
    """
    from twoaxis.sequence.mixer import Mixer

    return Mixer(MIXERS.find(name), MIXERS.config(name, options))
