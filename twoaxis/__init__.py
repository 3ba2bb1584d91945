"""twoaxis: residual streams and local mixers for decoder language models.

Names are imported on first use, so that `twoaxis --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoaxis.commands.check import check as check
    from twoaxis.commands.compare import compare as compare
    from twoaxis.commands.methods import methods as methods
    from twoaxis.commands.probe import probe as probe
    from twoaxis.commands.report import report as report
    from twoaxis.commands.train import train as train
    from twoaxis.depth.blend import Blend as Blend
    from twoaxis.depth.compose import compose as compose
    from twoaxis.depth.registry import register as register
    from twoaxis.depth.registry import stream as stream
    from twoaxis.depth.registry import stream_names as stream_names
    from twoaxis.depth.site import Placement as Placement
    from twoaxis.depth.site import Site as Site
    from twoaxis.depth.stream import Seen as Seen
    from twoaxis.depth.stream import State as State
    from twoaxis.depth.stream import Stream as Stream
    from twoaxis.inspection.inspection import inspect as inspect
    from twoaxis.inspection.trace import trace as trace
    from twoaxis.model.config import Methods as Methods
    from twoaxis.model.config import ModelConfig as ModelConfig
    from twoaxis.model.decoder import Decoder as Decoder
    from twoaxis.model.graft import TwoAxisForCausalLM as TwoAxisForCausalLM
    from twoaxis.model.graft import TwoAxisModel as TwoAxisModel
    from twoaxis.model.graft import graft as graft
    from twoaxis.model.graft_config import TwoAxisConfig as TwoAxisConfig
    from twoaxis.model.presets import preset as preset
    from twoaxis.model.presets import preset_names as preset_names
    from twoaxis.pretrained.retrofit import retrofit as retrofit
    from twoaxis.ring import Ring as Ring
    from twoaxis.sequence.canon import Canon as Canon
    from twoaxis.sequence.dynamic_conv import DynamicConv as DynamicConv
    from twoaxis.sequence.mixer import LocalOperator as LocalOperator
    from twoaxis.sequence.registry import mixer as mixer
    from twoaxis.sequence.registry import mixer_names as mixer_names
    from twoaxis.sequence.short_conv import ShortConv as ShortConv
    from twoaxis.sequence.short_swa import ShortSWA as ShortSWA
    from twoaxis.window import document_reach as document_reach
    from twoaxis.window import padding_reach as padding_reach
    from twoaxis.window import window_attention as window_attention

__version__ = "0.2.0"

_HOMES = {
    "Blend": "twoaxis.depth.blend",
    "Canon": "twoaxis.sequence.canon",
    "Decoder": "twoaxis.model.decoder",
    "DynamicConv": "twoaxis.sequence.dynamic_conv",
    "LocalOperator": "twoaxis.sequence.mixer",
    "Methods": "twoaxis.model.config",
    "ModelConfig": "twoaxis.model.config",
    "Placement": "twoaxis.depth.site",
    "Ring": "twoaxis.ring",
    "Seen": "twoaxis.depth.stream",
    "ShortConv": "twoaxis.sequence.short_conv",
    "ShortSWA": "twoaxis.sequence.short_swa",
    "Site": "twoaxis.depth.site",
    "State": "twoaxis.depth.stream",
    "Stream": "twoaxis.depth.stream",
    "TwoAxisConfig": "twoaxis.model.graft_config",
    "TwoAxisForCausalLM": "twoaxis.model.graft",
    "TwoAxisModel": "twoaxis.model.graft",
    "check": "twoaxis.commands.check",
    "compare": "twoaxis.commands.compare",
    "compose": "twoaxis.depth.compose",
    "document_reach": "twoaxis.window",
    "graft": "twoaxis.model.graft",
    "inspect": "twoaxis.inspection.inspection",
    "methods": "twoaxis.commands.methods",
    "mixer": "twoaxis.sequence.registry",
    "mixer_names": "twoaxis.sequence.registry",
    "padding_reach": "twoaxis.window",
    "preset": "twoaxis.model.presets",
    "preset_names": "twoaxis.model.presets",
    "probe": "twoaxis.commands.probe",
    "register": "twoaxis.depth.registry",
    "report": "twoaxis.commands.report",
    "retrofit": "twoaxis.pretrained.retrofit",
    "stream": "twoaxis.depth.registry",
    "stream_names": "twoaxis.depth.registry",
    "trace": "twoaxis.inspection.trace",
    "train": "twoaxis.commands.train",
    "window_attention": "twoaxis.window",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'twoaxis' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"twoaxis.{name} needs transformers: pip install 'twoaxis[hf]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
