"""The registry of mixers: one line per mixer, and the function that builds them by name."""

from __future__ import annotations

from typing import Any

from twoaxis.base.registry import Registry
from twoaxis.sequence.mixer import Mixer

MIXERS: Registry[Mixer] = Registry(
    "mixer",
    {
        "short_swa": "twoaxis.sequence.short_swa:ShortSWAMixer",
        "short_conv": "twoaxis.sequence.short_conv:ShortConvMixer",
        "canon": "twoaxis.sequence.canon:CanonMixer",
    },
)


def mixer_names() -> tuple[str, ...]:
    """The names `mixer` takes."""
    return MIXERS.names()


def mixer(name: str, **options: Any) -> Mixer:
    """A local mixer by name.

        mixer("short_swa", window=16, heads=2, head_width=32)

    Args:
        name: one of `mixer_names()`.
        **options: the mixer's own; see its Config.
    """
    cls = MIXERS.find(name)
    return cls(MIXERS.config(name, options))
