"""The precision rule of the house: routing weights, norms and softmaxes run in float32 at least."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def routing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype routing runs in for activations of `dtype`: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """`x` in its routing dtype; no copy when it already has it."""
    wide = routing_dtype(x.dtype)
    return x if x.dtype == wide else x.to(wide)  # decoding is mostly calls, and `to` is one


def launch_bound(x: Tensor) -> bool:
    """Whether `x` is so small, the state of a few tokens, that the calls take more time than their numbers."""
    return x.numel() <= 1 << 14


def narrowed(device: str) -> bool:
    """Whether a mixed-precision region is around; shapes without numbers (device meta) know none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _device_of(values: Any) -> str | None:
    for value in values:
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, list | tuple) and (found := _device_of(value)) is not None:
            return found
    return None


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Run `fn` with autocast off, so that a mixed-precision region does not narrow the routing."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled():  # decoding is mostly calls: no search for a device without need
            return fn(*args, **kwargs)
        device = _device_of(args) or _device_of(kwargs.values()) or "cpu"
        if not narrowed(device):
            return fn(*args, **kwargs)
        with torch.autocast(device_type=device, enabled=False):
            return fn(*args, **kwargs)

    return run
