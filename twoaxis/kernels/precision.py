"""The precision rule of the house: routing weights, norms, softmaxes and products run in float32 at least."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from twoaxis.kernels.dispatch import device_of

P = ParamSpec("P")
R = TypeVar("R")


def routing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype routing runs in for activations of `dtype`: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; decoding is mostly calls, and `to` is one even where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def widen(x: Tensor) -> Tensor:
    """`x` in its routing dtype; no copy when it already has it."""
    return cast(x, routing_dtype(x.dtype))


def launch_bound(x: Tensor) -> bool:
    """Whether `x` is so small, the state of a few tokens, that the calls take more time than their numbers."""
    return x.numel() <= 1 << 14


@torch.compiler.assume_constant_result
def narrow_products(device: str) -> bool:
    """Whether float32 matrix products on a type of device may round their factors to TF32 or bfloat16."""
    if device not in ("cpu", "cuda"):
        return False
    setting: str = torch._C._get_fp32_precision_getter("mkldnn" if device == "cpu" else device, "matmul")
    return setting in ("tf32", "bf16")


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of wide tensors, whose factors are never rounded.

    Where float32 products may be narrow they run in float64: a product with the identity keeps every bit.
    """
    if a.dtype == torch.float32 and narrow_products(device_of(a)):
        return (a.double() @ b.double()).to(a.dtype)
    return a @ b


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Run `fn` with autocast off, so that a mixed-precision region does not narrow the routing."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled():  # decoding is mostly calls: no search for a device without need
            return fn(*args, **kwargs)
        device = _device_of((args, *kwargs.values())) or "cpu"
        if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors know no such region
            return fn(*args, **kwargs)
        with torch.autocast(device_type=device, enabled=False):
            return fn(*args, **kwargs)

    return run


def _device_of(value: Any) -> str | None:
    """The type of device of the first tensor in nested lists."""
    if isinstance(value, Tensor):
        return value.device.type
    return next(filter(None, map(_device_of, value)), None) if isinstance(value, list | tuple) else None
