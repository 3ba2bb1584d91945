"""The operators that methods are built of, each with its reference and its forms; `operator` says how they meet.

Importing forms registers them, and the one registered last is tried first.
"""

from twoaxis.kernels import history, rewrite, sinkhorn, streams, taps  # noqa: F401

from twoaxis.kernels import attention_blocked as attention_blocked  # isort: skip
from twoaxis.kernels import attention_band as attention_band  # isort: skip
from twoaxis.kernels import attention_fused as attention_fused  # isort: skip
from twoaxis.kernels.operator import OPERATORS as OPERATORS
from twoaxis.kernels.operator import using as using
