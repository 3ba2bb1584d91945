"""The operators that methods are built of, each with its reference and its forms; `operator` says how they meet.

Importing the forms registers them: a form that precedes another is imported before it.
"""

from twoaxis.kernels.operator import OPERATORS as OPERATORS
from twoaxis.kernels.operator import using as using

from twoaxis.kernels import history_eager as history_eager  # isort: skip
from twoaxis.kernels import rewrite_eager as rewrite_eager  # isort: skip
from twoaxis.kernels import sinkhorn_eager as sinkhorn_eager  # isort: skip
from twoaxis.kernels import streams_eager as streams_eager  # isort: skip
from twoaxis.kernels import attention_flex as attention_flex  # isort: skip
from twoaxis.kernels import attention_fused as attention_fused  # isort: skip
from twoaxis.kernels import attention_gather as attention_gather  # isort: skip
from twoaxis.kernels import attention_tiles as attention_tiles  # isort: skip
from twoaxis.kernels import attention_blocked as attention_blocked  # isort: skip
from twoaxis.kernels import taps_eager as taps_eager  # isort: skip
