"""Pretrained checkpoint to two-axis model, equal at step 0.

    source ──► family: config and names ──► our model, new parameters neutral ──► measured against the source ──► folder

The package can be called: `twoaxis.retrofit("folder", stream="denseformer")` is `twoaxis.retrofit.convert.retrofit`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoaxis.retrofit.convert import Retrofitted


class _Package(ModuleType):
    """The function and its package share one name, so the module answers a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Retrofitted:
        """See `twoaxis.retrofit.convert.retrofit`."""
        from twoaxis.retrofit.convert import retrofit

        return retrofit(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
retrofit = sys.modules[__name__]
