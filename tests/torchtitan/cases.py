"""What is trained by torchtitan's trainer, each on so many processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCABULARY, CONTEXT, STEPS = 40, 12, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "stream": "attention_residuals",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run; all but those in bfloat16 have the losses of the first."""

    name: str
    processes: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    accumulate: int = 1
    clip: float = 100.0
    recompute: bool = False
    saved: bool = False


PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}
LOOPED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
CASES = (
    Case(name="one", accumulate=2),
    Case(name="fsdp", processes=2, parallel={"data_parallel_shard_degree": 2}, recompute=True, saved=True),
    Case(name="pp", processes=2, parallel=PIPELINE, accumulate=2),
    Case(name="looped", processes=2, parallel=PIPELINE | LOOPED),
    Case(name="bf16", processes=2, parallel={"data_parallel_shard_degree": 2}, dtype="bfloat16"),
    Case(name="pp-bf16", processes=2, parallel=PIPELINE, dtype="bfloat16"),
)
