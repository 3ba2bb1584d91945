"""Which device's kernels run: every kernel asks here.

with target("cpu"):        # meta tensors have no device of their own: choose the kernels of this one
    model(meta_tokens)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_TARGET: ContextVar[str] = ContextVar("target", default="meta")


@contextmanager
def target(device: str | None) -> Iterator[None]:
    """Let meta tensors choose their kernels as on `device`; None are the forms that every device has."""
    token = _TARGET.set(device or "meta")
    try:
        yield
    finally:
        _TARGET.reset(token)


def device_of(x: Tensor) -> str:
    """The type of device whose kernels `x` takes."""
    device = x.device.type
    return device if device != "meta" else _TARGET.get()  # only then asked: compiled code has no guard on the variable
