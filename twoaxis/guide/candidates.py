"""What advice chooses from: the methods in the forms worth proposing, spelled for a shape.

goal        what it means                                         the paper's choice (arXiv 2603.16039, section 2.5)
shortcut    a better residual: how a sub-layer's output is added  deep_delta
mixing      local, content-adaptive mixing of neighbouring tokens short_swa
retrieval   later layers read earlier ones                        none: depth reads are for studying retrieval itself
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from twoaxis.model.config import ModelConfig
    from twoaxis.model.variant import Contender

Goal = Literal["any", "shortcut", "mixing", "retrieval"]
Start = Literal["scratch", "retrofit"]

PAPER: dict[str, str] = {"shortcut": "deep_delta", "mixing": "short_swa"}
"""What the paper advises for a goal."""
SOURCES = 8
"""Blocks of block Attention Residuals; its paper finds about this many enough."""
DEEP = 24
"""Blocks from which DenseFormer is proposed with the dilation and period its paper recommends."""
LAST = 2
"""Last blocks that have MUDDFormer where it is proposed for these alone."""


class Place(NamedTuple):
    """Where a candidate is wanted.

    Attributes:
        shape: the decoder.
        start: from scratch or onto a trained model.
        gpu: whether windows are aligned with the chunks of GPU kernels.
    """

    shape: ModelConfig
    start: Start
    gpu: bool


class Candidate(NamedTuple):
    """A method in one form.

    Attributes:
        name: of the stream or mixer.
        form: as the records call it.
        axis: stream or mixer.
        goal: what it is for.
        why: what it does, in a sentence.
        spell: the method with its options for a place.
    """

    name: str
    form: str
    axis: Literal["stream", "mixer"]
    goal: Goal
    why: str
    spell: Callable[[Place], str]

    @property
    def title(self) -> str:
        """Name and form."""
        return f"{self.name} ({self.form})" if self.form else self.name

    def contender(self, place: Place) -> Contender:
        """For the cost model and for commands."""
        from twoaxis.model.variant import make_contender

        text = self.spell(place)
        return make_contender(text) if self.axis == "stream" else make_contender(None, text)


def _plain(text: str) -> Callable[[Place], str]:
    return lambda place: text


def _with(text: str, retrofit: str) -> Callable[[Place], str]:
    """A spelling, and the options whose start is the plain residual exactly."""

    def spell(place: Place) -> str:
        return f"{text}{',' if ':' in text else ':'}{retrofit}" if place.start == "retrofit" else text

    return spell


def _blocks(place: Place) -> str:
    size = 2 * max(1, round(place.shape.num_hidden_layers / SOURCES))  # sub-layers, whole blocks of the decoder
    return _with(f"attention_residuals:block_size={size}", "read=sum")(place)


def _delta_blocks(place: Place) -> str:
    size = 2 * max(1, round(place.shape.num_hidden_layers / SOURCES))
    return _with(f"delta_attention_residuals:block_size={size}", "gate=zero")(place)


def _lime(place: Place) -> str:
    return f"lime:over=heads,kv_heads={place.shape.kv_heads}"


def _heads(place: Place) -> int:
    """As many heads as attention has, or the nearest number below that divides the width into even heads."""
    width = place.shape.hidden_size
    return next(n for n in range(place.shape.num_attention_heads, 0, -1) if width % n == 0 and (width // n) % 2 == 0)


def _kv_heads(place: Place) -> int:
    heads, wanted = _heads(place), place.shape.kv_heads
    return next(n for n in range(min(wanted, heads), 0, -1) if heads % n == 0)


def _depth_attention(place: Place) -> str:
    return f"depth_attention:window=4,heads={_heads(place)},kv_heads={_kv_heads(place)}"


def _short_swa(place: Place) -> str:
    return f"short_swa:window={128 if place.gpu else 16},heads={_heads(place)},kv_heads={_kv_heads(place)}"


def _thin(place: Place) -> str:
    """An eighth of the width, in heads of at most 64."""
    width = max(2, place.shape.hidden_size // 8)
    size = next(n for n in range(min(64, width), 0, -1) if n % 2 == 0)
    return f"short_swa:window={128 if place.gpu else 16},heads={max(1, width // size)},head_width={size}"


def _gated(place: Place) -> str:
    """A rank of an eighth of the width, Qwen's at a width of 2560."""
    return f"gated_streams:rank={max(4, place.shape.hidden_size // 8)}"


def _denseformer(place: Place) -> str:
    return "denseformer:dilation=4,period=5" if place.shape.num_hidden_layers >= DEEP else "denseformer"


def _last_blocks(place: Place) -> str:
    blocks = place.shape.num_hidden_layers
    first = max(0, blocks - LAST)
    return f"muddformer:placement={first}-{blocks - 1}" if first < blocks - 1 else f"muddformer:placement={first}"


CANDIDATES: tuple[Candidate, ...] = (
    Candidate(
        *("deep_delta", "d_v=1", "stream", "shortcut"),
        "each sub-layer erases and rewrites one direction of the state; the state stays as wide as it was",
        _plain("deep_delta"),
    ),
    Candidate(
        *("deep_delta", "d_v=4", "stream", "shortcut"),
        "the same on a state of four value channels, the form its authors call the default",
        _plain("deep_delta:value_channels=4,expand=conv"),
    ),
    Candidate(
        *("hyper_connections", "", "stream", "shortcut"),
        "four residual streams that every sub-layer reads, mixes and writes by learned weights",
        _with("hyper_connections", "readout=mean"),
    ),
    Candidate(
        *("manifold_hyper_connections", "", "stream", "shortcut"),
        "the same with mixing that cannot grow: doubly stochastic matrices",
        _with("manifold_hyper_connections", "readout=mean"),
    ),
    Candidate(
        *("hyper_connections", "fractions", "stream", "shortcut"),
        "the same routing on two slices of one residual, which stays as wide as it was",
        _plain("hyper_connections:streams=1,fractions=2"),
    ),
    Candidate(
        *("wide_residual", "", "stream", "shortcut"),
        "four residual streams read and written by static scalars; plain at the start",
        _plain("wide_residual"),
    ),
    Candidate(
        *("gated_streams", "", "stream", "shortcut"),
        "four residual streams, read per channel through a low-rank gate of their norms",
        _gated,
    ),
    Candidate(
        *("scaled", "x0", "stream", "shortcut"),
        "scalars per block on the residual and on the embedding, which is added again",
        _plain("scaled"),
    ),
    Candidate(
        *("scaled", "laurel", "stream", "shortcut"),
        "bounded weights on both sides of the sum, and a low-rank map of the residual",
        _plain("scaled:form=laurel"),
    ),
    Candidate(
        *("attention_residuals", "block", "stream", "retrieval"),
        "every sub-layer attends over the sums of earlier groups of sub-layers",
        _blocks,
    ),
    Candidate(
        *("attention_residuals", "full", "stream", "retrieval"),
        "every sub-layer attends over all earlier outputs",
        _with("attention_residuals", "read=sum"),
    ),
    Candidate(
        *("attention_residuals", "heads", "stream", "retrieval"),
        "the same with a softmax for each of four groups of channels (MHAR)",
        _with("attention_residuals:heads=4", "read=sum"),
    ),
    Candidate(
        *("delta_attention_residuals", "", "stream", "retrieval"),
        "the residual goes on, and every sub-layer also attends over all earlier increments",
        _with("delta_attention_residuals", "gate=zero"),
    ),
    Candidate(
        *("delta_attention_residuals", "block", "stream", "retrieval"),
        "the same over the increments of groups of sub-layers",
        _delta_blocks,
    ),
    Candidate(
        *("lime", "heads", "stream", "retrieval"),
        "each attention reads learned mixtures of the keys and values of all layers so far",
        _lime,
    ),
    Candidate(
        *("depth_kv", "", "stream", "retrieval"),
        "each attention's values are mixed with earlier layers' by its own queries and keys; it learns nothing more",
        _plain("depth_kv"),
    ),
    Candidate(
        *("denseformer", "", "stream", "retrieval"),
        "a learned weighted sum of earlier block outputs, the same for all tokens",
        _denseformer,
    ),
    Candidate(
        *("muddformer", "", "stream", "retrieval"),
        "separate sums of earlier block outputs for queries, keys, values and the residual, weighted per token",
        _plain("muddformer"),
    ),
    Candidate(
        *("muddformer", "last blocks", "stream", "retrieval"),
        "the same in the last two blocks alone, where the speed-runs found it affordable",
        _last_blocks,
    ),
    Candidate(
        *("deep_cross_attention", "", "stream", "retrieval"),
        "queries, keys and values read their own weighted sums of earlier contributions; the last two one by one",
        _plain("deep_cross_attention:window=2"),
    ),
    Candidate(
        *("depth_attention", "", "stream", "retrieval"),
        "the sequence operator on the depth axis: attention over a token's last four states",
        _depth_attention,
    ),
    Candidate(
        *("elc_bert", "", "stream", "retrieval"),
        "each block reads a convex combination of all earlier ones in place of the residual",
        _plain("elc_bert"),
    ),
    Candidate(
        *("vertical_attention", "", "stream", "retrieval"),
        "the same with normalised sources, as far as reviews of the paper tell",
        _plain("vertical_attention"),
    ),
    Candidate(
        *("short_swa", "", "mixer", "mixing"),
        "attention over a short window of tokens before each global attention",
        _short_swa,
    ),
    Candidate(
        *("short_swa", "thin", "mixer", "mixing"),
        "the same with an eighth of the width, because the projections are what it costs",
        _thin,
    ),
    Candidate(
        *("short_conv", "", "mixer", "mixing"),
        "a depthwise convolution over four tokens as a sub-layer of its own",
        _plain("short_conv"),
    ),
    Candidate(
        *("canon", "", "mixer", "mixing"),
        "depthwise convolutions over four tokens at four points of every block, each with its residual",
        _plain("canon"),
    ),
    Candidate(
        *("dynamic_conv", "", "mixer", "mixing"),
        "convolutions over four tokens on queries, keys and values, with filters made of the current token",
        _plain("dynamic_conv"),
    ),
)
"""In no order that matters: the ranking gives one."""


def for_goal(goal: Goal) -> tuple[Candidate, ...]:
    """The candidates that serve a goal."""
    return tuple(c for c in CANDIDATES if goal in ("any", c.goal))
