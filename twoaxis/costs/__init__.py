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

_HOMES = {
    "Costs": "costs.costs",
    "cost": "costs.costs",
    "Deployment": "model.deployment",
    "find_shape": "model.presets",
}
"""Public names and the modules they live in, loaded when asked for: torch comes with them."""

__all__ = ["Costs", "Deployment", "cost", "find_shape"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"twoaxis.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
