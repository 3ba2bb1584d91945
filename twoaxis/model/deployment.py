"""How a model is spread over devices and what runs on it, checked against its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from twoaxis.base.options import Count, Options

if TYPE_CHECKING:
    from twoaxis.model.config import ModelConfig
    from twoaxis.model.graft_config import TwoAxisConfig


@dataclass(frozen=True, kw_only=True)
class Deployment(Options):
    """Devices, batch sizes and precision."""

    hardware: str = "h100"
    """A device by name (a100, h100, h200, b200), here for this machine, or a file that --save wrote."""
    data_parallel: Count = 1
    """Replicas; the optimiser's state is spread over them."""
    tensor_parallel: Count = 1
    """Devices that share each sub-layer."""
    pipeline_stages: Count = 1
    """Devices that share the depth."""
    virtual_stages: Count = 1
    """Chunks of blocks on each pipeline device, one per round."""
    sequence_parallel: bool = False
    """Spread the stream and the norms over the tensor-parallel devices along the sequence."""
    micro_batch: Count = 1
    """Sequences of a training pass on each replica."""
    context: Count = 4096
    """Tokens of a sequence, in training and when decoding begins."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and activations."""
    recompute: Literal["none", "block", "full"] = "none"
    """Activations made anew in the backward pass: none, block by block, or a whole pipeline chunk at once."""
    prefill_chunk: Count | None = None
    """Tokens of a prefill pass; None is the whole context."""
    batch: Count = 1
    """Sequences that decode together."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.virtual_stages > 1 and self.pipeline_stages == 1:
            raise ValueError(
                f"{self.virtual_stages} virtual stages need a pipeline: "
                "give pipeline_stages of at least 2, or 1 virtual stage"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence parallelism needs tensor parallelism: give tensor_parallel of at least 2")
        if self.sequence_parallel and self.context % self.tensor_parallel:
            nearest = max(1, round(self.context / self.tensor_parallel)) * self.tensor_parallel
            raise ValueError(
                f"a context of {self.context} cannot be spread over {self.tensor_parallel} devices; "
                f"the nearest that can is {nearest}"
            )
        if self.prefill_chunk is not None and self.prefill_chunk > self.context:
            raise ValueError(f"a prefill chunk of {self.prefill_chunk} is longer than the context of {self.context}")

    @property
    def chunks(self) -> int:
        """Pieces the depth is cut into."""
        return self.pipeline_stages * self.virtual_stages

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prefill pass."""
        return self.prefill_chunk or self.context

    @property
    def spread(self) -> int:
        """Devices that share the stream and the norms."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def check(self, shape: ModelConfig | TwoAxisConfig) -> None:
        """Refuse what the shape does not allow."""
        blocks = shape.num_hidden_layers
        if blocks % self.chunks:
            cut = f"{self.pipeline_stages} stages"
            if self.virtual_stages > 1:
                cut += f" of {self.virtual_stages} virtual ones ({self.chunks} chunks)"
            raise ValueError(f"{blocks} blocks cannot be cut into {cut}; {self._nearest_cut(blocks)}")
        self._divides(shape.num_attention_heads, "attention heads")
        for hidden in {shape.hidden_width(block) for block in range(blocks)}:
            self._divides(hidden, "hidden channels of the MLP")

    def _nearest_cut(self, blocks: int) -> str:
        """What could be asked for instead: other stages, and if no number of stages will do other virtual ones."""
        stages = [p for p in _divisors(blocks) if blocks % (p * self.virtual_stages) == 0 and p > 1]
        if stages:
            per = f" with {self.virtual_stages} virtual ones each" if self.virtual_stages > 1 else ""
            return f"the nearest number of stages{per} is {_nearest(self.pipeline_stages, stages)}"
        virtual = [v for v in _divisors(blocks) if blocks % (self.pipeline_stages * v) == 0]
        if virtual:
            count = _nearest(self.virtual_stages, virtual)
            return f"the nearest with {self.pipeline_stages} stages is {count} virtual ones each"
        return f"the nearest number of chunks is {_nearest(self.chunks, _divisors(blocks))}"

    def _divides(self, count: int, what: str) -> None:
        if count % self.tensor_parallel:
            nearest = _nearest(self.tensor_parallel, _divisors(count))
            raise ValueError(
                f"{count} {what} cannot be spread over {self.tensor_parallel} devices; the nearest number is {nearest}"
            )


ONE_DEVICE = Deployment()
"""The defaults."""


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _nearest(wanted: int, possible: list[int]) -> int:
    return min(possible, key=lambda n: (abs(n - wanted), n))
