"""`retrofit`: a pretrained model gets a stream or a mixer and computes the same at step 0.

    made = twoaxis.retrofit("folder", stream="attention_residuals:block_size=8", out="retrofitted")
    made.model, made.tokenizer, made.record

The order of the work: check everything that can be checked without weights; load the source and run it on text; take
over its additions; run it on the same text again; write.
"""

from __future__ import annotations

import contextlib
import copy
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from twoaxis.base.files import atomic_folder, check_empty, claim, remove_partial
from twoaxis.pretrained.record import Record, write_record
from twoaxis.pretrained.start import Start, choose, read_method

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase
    from transformers.modeling_utils import PreTrainedModel

    from twoaxis.model.graft import TwoAxisForCausalLM
    from twoaxis.pretrained.measure import Difference, Text
    from twoaxis.pretrained.source import Source

DTYPES = ("float32", "bfloat16", "float16", "float64")
TOKENS = 768
"""Tokens of the text that the difference is measured on."""


class Retrofitted(NamedTuple):
    """What `retrofit` returns.

    Attributes:
        model: the two-axis model.
        tokenizer: the source's, if it has one.
        record: what was done and measured; `retrofit.json` of the folder.
    """

    model: TwoAxisForCausalLM
    tokenizer: PreTrainedTokenizerBase | None
    record: Record


def retrofit(
    source: str | Path | PreTrainedModel,
    *,
    stream: str = "standard",
    mixer: str | None = None,
    placement: str | None = None,
    mixer_blocks: list[int] | None = None,
    blend: bool | None = None,
    dtype: str | torch.dtype | None = None,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    text: str | Path | None = None,
    tokens: int = TOKENS,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Retrofitted:
    """Put a residual stream, a mixer or both on a pretrained model.

    Args:
        source: a folder with safetensors, a GGUF file, a name on the hub, or a transformers model, which is left alone.
        stream: NAME[:option=value,...]; see `twoaxis.stream_names()`.
        mixer: NAME[:option=value,...]; see `twoaxis.mixer_names()`.
        placement: which blocks and sites use the stream's method, e.g. "8-11/attention".
        mixer_blocks: blocks that have the mixer; None is all of them.
        blend: None uses Blend where the method has no exact neutral start; True always; False refuses it.
        dtype: float32, bfloat16, float16 or float64; None is the source's.
        out: folder to write; it must not exist or be empty. None writes nothing.
        tokenizer: of a source that is a model at hand; a folder has its own.
        text: file to measure the difference on; None is a few kilobytes of the standard library.
        tokens: how many of its tokens.
        seed: of the new parameters that start at random.
        say: told what is being done, for a person who waits.
    """
    say = say or (lambda _: None)
    asked = read_method(stream, mixer, placement, mixer_blocks, blend)
    wanted = _dtype(dtype)
    if out is not None:
        _check_out(Path(out))
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from twoaxis.pretrained.source import open_source

    with contextlib.ExitStack() as stack:
        if out is not None:  # for all of the time it takes: a second process would find out at the end only
            stack.enter_context(claim(out, beside=True))
            remove_partial(Path(out).parent, Path(out).name)
        say("reading the configuration")
        found = open_source(source)
        start = choose(asked, *_shape(found.config))
        tokenizer = found.tokenizer() if tokenizer is None else tokenizer
        sample = _sample(found, tokenizer, tokens, text)
        say("loading the source")
        model, parameters, against = _convert(found, start, wanted, sample, seed, say)
        say("computing the source's hash")
        record = _record(found, start, model, parameters, (sample, against), seed)
        model.retrofit_record = record  # type: ignore[assignment]
        if out is not None:
            say(f"writing {out}")
            write(Path(out), model, tokenizer, record)
        return Retrofitted(model, tokenizer, record)


def _shape(config: Any) -> tuple[int, list[tuple[str, ...]]]:
    """Width and sub-layers to choose a start with, before any weights are read; the layers themselves decide later."""
    text = config.get_text_config(decoder=True)
    blocks, width = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
    if not isinstance(blocks, int) or not isinstance(width, int):
        raise ValueError(f"the configuration of {config.model_type} says neither its layers nor its width")
    return width, [("attention", "mlp")] * blocks


def write(out: Path, model: TwoAxisForCausalLM, tokenizer: Any, record: Record) -> None:
    """Write the folder whole or not at all."""
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_record(record, folder)


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; it is one of {', '.join(DTYPES)}")
    import torch

    return getattr(torch, name)


def _check_out(out: Path) -> None:
    """Refuse a place that cannot be written to before the work begins."""
    check_empty(out)
    there = next(parent for parent in out.absolute().parents if parent.exists())
    if not there.is_dir():
        raise ValueError(f"{out} cannot be written: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{out} cannot be written: no permission in {there}")


def _sample(source: Source, tokenizer: Any, tokens: int, path: str | Path | None) -> Text:
    """The text of the measurement; refuses a tokenizer that is not the model's."""
    from twoaxis.pretrained.measure import make_text

    config: Any = source.config
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {config.vocab_size}: "
            "they do not belong together"
        )
    return make_text(tokenizer, config.vocab_size, config.max_position_embeddings, tokens, path)


def _convert(
    source: Source, start: Start, dtype: torch.dtype | None, sample: Text, seed: int, say: Callable[[str], None]
) -> tuple[TwoAxisForCausalLM, int, Difference]:
    """The model, the number of the source's parameters, and how far it is from the source."""
    from twoaxis.model.graft import graft
    from twoaxis.model.survey import TOLERANCE
    from twoaxis.pretrained.measure import difference, logits

    theirs = source.load(dtype)
    if source.model is not None:
        theirs = copy.deepcopy(theirs)
        if dtype is not None:
            cast(Any, theirs).to(dtype)
    parameters = count(theirs)[0]
    say("running the source on text")
    expected = logits(theirs.eval(), sample)
    generation = _generation(theirs)
    say("putting the method on it")
    model = graft(theirs, start.methods, seed=seed)
    model.generation_config = generation  # type: ignore[assignment]
    say("running the retrofitted model on text")
    against = difference(logits(model, sample), expected)
    bound = TOLERANCE[model.dtype]
    if against.relative > bound:
        raise ValueError(
            f"the retrofitted model does not compute what {source.name} computes: its logits differ by "
            f"{against.largest:.3g}, {against.relative:.2g} of the largest; rounding explains {bound:g}. "
            "Nothing is written"
        )
    return model, parameters, against


def count(model: Any) -> tuple[int, int]:
    """Parameters and their bytes."""
    numbers = [parameter for parameter in model.parameters()]
    return sum(p.numel() for p in numbers), sum(p.numel() * p.element_size() for p in numbers)


def _generation(theirs: Any) -> Any:
    """The source's generation settings, without those that a two-axis model or a strict check would refuse."""
    from transformers import GenerationConfig

    found = copy.deepcopy(theirs.generation_config) or GenerationConfig.from_model_config(theirs.config)
    found.cache_implementation = None
    if not found.do_sample:  # sampling settings beside greedy decoding act on nothing, and cannot be saved
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            setattr(found, name, getattr(GenerationConfig(), name, None))
    return found


def _record(
    source: Source,
    start: Start,
    model: TwoAxisForCausalLM,
    from_source: int,
    measured: tuple[Text, Difference],
    seed: int,
) -> Record:
    import torch
    import transformers

    import twoaxis
    from twoaxis.model.graft_config import as_fields
    from twoaxis.pretrained.stuck import stuck

    text, against = measured
    parameters, size = count(model)
    return Record(
        source={
            "name": source.name,
            "kind": source.kind,
            "family": source.config.model_type,
            "sha256": source.digest(),
        },
        method=as_fields(start.methods),
        neutral=start.neutral,
        dtype=str(model.dtype).removeprefix("torch."),
        seed=seed,
        source_parameters=from_source,
        added_parameters=parameters - from_source,
        added_bytes=size - from_source * model.dtype.itemsize,
        measured={
            "text": {"name": text.name, "tokens": text.length, "bytes": text.bytes},
            "source": against._asdict(),
            "layers": model.config.architecture.exact,
        },
        new=tuple(model.new_parameters()),
        stuck=stuck(model, seed),
        notes=start.notes,
        versions={
            "twoaxis": twoaxis.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    )
