"""Every spelling of a method, conversion and text, for the tests of retrofitting."""

from __future__ import annotations

import copy
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from tests.support.foreign import byte_llama as byte_llama
from twoaxis.base.registry import spell
from twoaxis.depth.registry import STREAMS, stream, stream_names
from twoaxis.model.graft import graft
from twoaxis.pretrained.choose_start import choose, read_method
from twoaxis.sequence.registry import MIXERS, mixer_names


def _one_per_class() -> list[Any]:
    """The first variant of every stream for each neutral class that its variants have; slow where a class is known and
    the layers see nothing new: neither norms that are taken over nor changed keys and values."""
    chosen: dict[tuple[str, str], Any] = {}
    known: set[str] = set()
    for name in stream_names():
        for options in STREAMS.find(name).variants:
            made = stream(name, blocks=3, width=16, **options)
            site = made.sites[2]
            special = not made.normed(site) or made.changes_kv(site) or len(made.ways(site)) > 1
            marks = [] if special or made.neutral not in known else [pytest.mark.slow]
            if (name, made.neutral) not in chosen:
                chosen[name, made.neutral] = pytest.param(spell(name, dict(options)), marks=marks)
                known.add(made.neutral)
    return list(chosen.values())


STREAM_SPELLINGS = _one_per_class()
"""What a retrofit does depends on the neutral class and nothing else; that every variant is neutral as its class says
is a check of the kit."""

MIXER_SPELLINGS = [spell(n, dict(MIXERS.find(n).variants[0])) for n in mixer_names()]


def convert(theirs: PreTrainedModel, stream: str = "standard", mixer: str | None = None, **more: Any) -> Any:
    """`retrofit` without the measurements: the model and how it starts."""
    shape: Any = theirs.config
    asked = read_method(stream, mixer, **more)
    start = choose(asked, shape.hidden_size, [("attention", "mlp")] * shape.num_hidden_layers)
    return graft(copy.deepcopy(theirs), start.methods).eval(), start


def tokens(batch: int = 2, length: int = 22, vocabulary: int = 61, seed: int = 1) -> Tensor:
    """Random tokens."""
    return torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def library_bytes(name: str = "argparse.py", size: int = 40_000) -> Tensor:
    """Bytes of a module of the standard library, as tokens."""
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    return torch.tensor(list(path.read_bytes()[:size]))
