"""twoaxis: residual streams and local mixers for decoder language models.

Names are imported on first use, so that `twoaxis --help` does not wait for torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoaxis.base.plugins import use as use
    from twoaxis.commands.advise import advise as advise
    from twoaxis.commands.check import check as check
    from twoaxis.commands.compare import compare as compare
    from twoaxis.commands.cost import cost as cost
    from twoaxis.commands.methods import methods as methods
    from twoaxis.commands.models import evaluate as evaluate
    from twoaxis.commands.models import generate as generate
    from twoaxis.commands.probe import probe as probe
    from twoaxis.commands.report import report as report
    from twoaxis.commands.train import train as train
    from twoaxis.depth.blend import Blend as Blend
    from twoaxis.depth.compose import compose as compose
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
    from twoaxis.model.config import register as register
    from twoaxis.model.decoder import Decoder as Decoder
    from twoaxis.model.deployment import Deployment as Deployment
    from twoaxis.model.graft import TwoAxisForCausalLM as TwoAxisForCausalLM
    from twoaxis.model.graft import TwoAxisModel as TwoAxisModel
    from twoaxis.model.graft import graft as graft
    from twoaxis.model.graft_config import TwoAxisConfig as TwoAxisConfig
    from twoaxis.model.load import load_model as load_model
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
    alias.asname: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.asname
}
"""The modules of the names above, which stand there once, for type checkers and for this."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'twoaxis' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        from twoaxis.base.machine import needs

        raise ImportError(needs(f"twoaxis.{name}", "transformers")) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *_HOMES])
