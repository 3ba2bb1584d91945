"""What a residual stream or a local mixer costs at a scale nobody has run yet: counted, not guessed.

from twoaxis.costs import Deployment, cost

cost("llama-3-8b", "attention_residuals:block_size=8", Deployment(pipeline_stages=8, virtual_stages=4)).train.fused
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoaxis.costs.costs import Costs, cost
    from twoaxis.model.deployment import Deployment
    from twoaxis.model.presets import find_shape

__all__ = ["Costs", "Deployment", "cost", "find_shape"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("twoaxis.costs.costs"), name)  # which loads torch: only when it is asked for
