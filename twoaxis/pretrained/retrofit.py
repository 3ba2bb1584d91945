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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import atomic_folder, check_empty, claim, remove_partial
from twoaxis.base.machine import quietly, versions
from twoaxis.base.plugins import use_options
from twoaxis.pretrained.choose_start import Start, choose, read_method
from twoaxis.pretrained.record import Begun, Record, write_record
from twoaxis.show.document import Document, Facts, Showable

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


@dataclass(frozen=True)
class Retrofitted(Showable):
    """What `retrofit` returns.

    Attributes:
        model: the two-axis model.
        tokenizer: the source's, if it has one.
        record: what was done and measured; `retrofit.json` of the folder.
        folder: where it was written, if it was.
    """

    model: TwoAxisForCausalLM
    tokenizer: PreTrainedTokenizerBase | None
    record: Record
    folder: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The folder and the record."""
        return {"folder": self.folder, **self.record.to_dict()}

    def document(self) -> Document:
        """What was made of what, how far it is from the source, and what was added."""
        record, method = self.record, self.record.method
        source, text = record.measured["source"], record.measured["text"]
        largest, relative = source["largest"], source["relative"]
        differ = "0, bit for bit" if largest == 0 else f"{largest:.2e} ({relative:.1e} relative)"
        mixer = f", {method['mixer']}" if method["mixer"] else ""
        share = record.added_parameters / record.source_parameters
        rows = [
            ("source", f"{record.source['name']} ({record.source['family']}, {record.source['kind']})"),
            ("method", f"{method['stream']}{mixer}; start: {record.neutral}; {record.dtype}"),
            ("logits", f"differ from the source's by at most {differ}"),
            ("", f"likeliest token equal at {source['agree']:,} of {source['tokens']:,}"),
            ("text", f"{text['name']}: {text['tokens']:,} tokens, {text['bytes']:,} bytes"),
            ("added", f"{record.added_parameters:,} parameters ({share:.3%}), {record.added_bytes:,} bytes"),
        ]
        if self.folder is not None:
            following = f"twoaxis train --from {self.folder} --data FOLDER --out DIR{use_options(self.folder)}"
            rows = [("folder", self.folder), *rows, ("next", following)]
        return Document("", (Facts(tuple(rows)),))


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
        say: called with what is being done, for a person who waits.
    """
    say = say or (lambda _: None)
    asked = read_method(stream, mixer, placement, mixer_blocks, blend)
    wanted = _dtype(dtype)
    if out is not None:
        _check_out(Path(out))
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from twoaxis.model.save import system_errors
    from twoaxis.pretrained.source import open_source

    with contextlib.ExitStack() as stack:
        if out is not None:  # for all of the time it takes: a second process would find out at the end only
            stack.enter_context(claim(out, beside=True))
            remove_partial(Path(out).parent, Path(out).name)
        say("reading the configuration")
        found = open_source(source)
        stack.enter_context(quietly())  # from here on: a download may show its bar
        start = choose(asked, *found.shape())
        tokenizer = found.tokenizer() if tokenizer is None else tokenizer
        sample = _sample(found, tokenizer, tokens, text)
        say("loading the source")
        model, parameters, against = _convert(found, start, wanted, sample, seed, say)
        say("computing the source's hash")
        begun = Begun(found, start, seed, tuple(model.new_parameters()), parameters)
        record = make_record(begun, model, (sample, against))
        model.retrofit_record = record  # type: ignore[assignment]
        if out is not None:
            say(f"writing {out}")
            with atomic_folder(out) as folder, system_errors(Path(out)):
                model.save_pretrained(folder)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                write_record(record, folder)
        return Retrofitted(model, tokenizer, record, None if out is None else str(out))


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

    config: Any = source.config.get_text_config(decoder=True)
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {source.name} has {len(tokenizer)} tokens, the model's vocab_size is "
            f"{config.vocab_size}: they do not belong together"
        )
    return make_text(tokenizer, config.vocab_size, getattr(config, "max_position_embeddings", None), tokens, path)


def _convert(
    source: Source, start: Start, dtype: torch.dtype | None, sample: Text, seed: int, say: Callable[[str], None]
) -> tuple[TwoAxisForCausalLM, int, Difference]:
    """The model, the number of the source's parameters, and how far it is from the source."""
    from twoaxis.model.graft import graft
    from twoaxis.model.graft_survey import TOLERANCE
    from twoaxis.pretrained.measure import difference, logits

    theirs: Any = source.load(dtype)
    if source.model is not None:
        theirs = copy.deepcopy(theirs)
        theirs = theirs if dtype is None else theirs.to(dtype)
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
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


def _generation(theirs: Any) -> Any:
    """The source's generation settings, without those that a two-axis model or a strict check would refuse."""
    from transformers import GenerationConfig

    found = copy.deepcopy(theirs.generation_config) or GenerationConfig.from_model_config(theirs.config)
    found.cache_implementation = None
    if not found.do_sample:  # sampling settings beside greedy decoding act on nothing, and cannot be saved
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            setattr(found, name, getattr(GenerationConfig(), name, None))
    return found


def make_record(begun: Begun, model: Any, measured: tuple[Text, Difference] | None = None) -> Record:
    """What is kept of a retrofit, in training or before.

    `measured` is the text it was compared with its source on, and the difference; None where nobody did.
    """
    from twoaxis.model.graft_config import as_fields
    from twoaxis.pretrained.untrainable import stuck

    source, start, seed, new, from_source = begun
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in model.parameters()]
    compared: dict[str, Any] = {"layers": model.config.architecture.exact}
    if measured is not None:
        text, against = measured
        compared |= {"text": {"name": text.name, "tokens": text.length, "bytes": text.bytes}}
        compared |= {"source": against._asdict()}
    about = {"name": source.name, "kind": source.kind, "family": source.config.model_type}
    return Record(
        source=about | {"sha256": source.digest()},
        method=as_fields(start.methods),
        neutral=start.neutral,
        dtype=str(model.dtype).removeprefix("torch."),
        seed=seed,
        source_parameters=from_source,
        added_parameters=sum(count for count, _ in sizes) - from_source,
        added_bytes=sum(count * size for count, size in sizes) - from_source * model.dtype.itemsize,
        measured=compared,
        new=new,
        stuck=stuck(model, seed),
        notes=start.notes,
        versions={name: version for name, version in versions().items() if version and name != "tokenizers"},
    )
