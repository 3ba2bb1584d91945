"""From the fields of a run to its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.spec import parse, spell
from twoaxis.model.variant import make_contender
from twoaxis.training.config import TrainConfig

if TYPE_CHECKING:
    from twoaxis.model.hf_config import TwoAxisConfig
    from twoaxis.model.hf_model import TwoAxisForCausalLM
    from twoaxis.training.groups import Group


ANY = 2**20
"""Stands for a vocabulary that is not known yet."""


def resolve(config: TrainConfig) -> TrainConfig:
    """A run with everything in its own place.

    Fields of training that the stream and the mixer change (`train.lr=...`) are set; labels, which change no number,
    are left out. Going on from a saved model without naming a tokenizer means the one beside the model.
    """
    contender = make_contender(config.stream, config.mixer)
    changed = dict(contender.train)
    if changed or "label=" in f"{config.stream},{config.mixer}":
        for place, spelling in (("stream", config.stream), ("mixer", config.mixer)):
            if spelling is not None:
                name, options = parse(spelling)
                kept = {k: v for k, v in options.items() if k != "label" and not k.startswith("train.")}
                changed[place] = spell(name, kept)
        for name, other in (("steps", "tokens"), ("tokens", "steps")):
            if name in contender.train:
                changed.setdefault(other, None)
    if config.source is not None and config.tokenizer.startswith("bpe:") and not config.data[0].startswith("task:"):
        changed["tokenizer"] = _own_tokenizer(config, config.source)
    return TrainConfig.from_dict(config.to_dict() | changed) if changed else config


def _own_tokenizer(config: TrainConfig, source: str) -> str:
    """A saved model's tokenizer in place of one that would be trained anew, whose tokens it does not know."""
    from twoaxis.data.tokenizer import has_tokenizer
    from twoaxis.model.load import check_folder

    check_folder(source)
    if not has_tokenizer(source):
        raise ValueError(f"{source} has no tokenizer; name the one its model was trained with, such as bytes")
    if config.tokenizer != TrainConfig.tokenizer:
        raise ValueError(
            f"tokenizer {config.tokenizer} would be trained anew, and the model in {source} knows nothing of its "
            "tokens; leave it out to use the model's own"
        )
    return source


def check(config: TrainConfig) -> None:
    """Refuse a run whose model cannot be made, before its data is read, which may take long."""
    if config.source is None:
        model_config(config, config.model.get("vocab_size", ANY))
    else:
        from twoaxis.model.load import check_folder

        check_folder(config.source)
        _own_shape(config, config.source)


def model_config(config: TrainConfig, vocabulary: int, end: int | None = None) -> TwoAxisConfig:
    """The configuration of a run's model.

    Args:
        config: the run.
        vocabulary: tokens of its data. A model may have more, never fewer.
        end: the token that ends a document, where generating stops.
    """
    from twoaxis.model.presets import preset, preset_fields

    fields: dict[str, Any] = {"vocab_size": vocabulary, **make_contender(config.stream, config.mixer).model_fields()}
    known = preset_fields(config.preset)
    fields["max_position_embeddings"] = max(config.context, known.get("max_position_embeddings", 0))
    if end is not None:
        fields["eos_token_id"] = end
    fields |= config.model
    if isinstance(fields["vocab_size"], int) and fields["vocab_size"] < vocabulary:
        raise ValueError(f"the data has {vocabulary} tokens, model.vocab_size is {fields['vocab_size']}")
    return preset(config.preset, **fields)


def make_model(config: TrainConfig, vocabulary: int, end: int | None = None) -> TwoAxisForCausalLM:
    """The model of a run before its first step, in float32 on the CPU.

    All runs of one `init_seed` share the initial values of everything their models have in common.

    Args:
        config: the run.
        vocabulary: tokens of its data.
        end: the token that ends a document.
    """
    if config.source is not None:
        return _load(config, config.source, vocabulary)
    import torch

    from twoaxis.model.hf_model import TwoAxisForCausalLM

    shape = model_config(config, vocabulary, end)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed if config.init_seed is None else config.init_seed)
        return TwoAxisForCausalLM(shape)


def _load(config: TrainConfig, source: str, vocabulary: int) -> TwoAxisForCausalLM:
    """A saved model to go on from."""
    from twoaxis.model.load import load_model

    _own_shape(config, source)
    model = load_model(source, "cpu").float()
    if model.config.vocab_size < vocabulary:
        raise ValueError(
            f"the data has {vocabulary} tokens, the model in {source} {model.config.vocab_size}: use its own tokenizer"
        )
    if model.config.max_position_embeddings < config.context:
        raise ValueError(
            f"context is {config.context}, the model in {source} is made for {model.config.max_position_embeddings}"
        )
    return model


def _own_shape(config: TrainConfig, source: str) -> None:
    """A saved model has a shape and methods of its own."""
    plain = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    given = [name for name in ("preset", "stream", "mixer") if getattr(config, name) != plain[name]]
    given += ["model"] if config.model else []
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be chosen with a model to go on from ({source}), which has its own; "
            "leave out either"
        )


def flops_per_token(config: TrainConfig, model: TwoAxisConfig) -> float:
    """Training operations of a token, by the convention of `twoaxis.model.flops`; recomputed blocks count again.

    Args:
        config: the run.
        model: from `model_config`.
    """
    from twoaxis.model.flops import training_flops

    return training_flops(model, config.context, recompute=config.recompute).total


def learn(config: TrainConfig, model: Any) -> list[Group]:
    """Choose what learns of a run's model, and how; see `twoaxis.training.groups`.

    In a retrofitted model pretrained parameters learn more slowly than new ones, as `twoaxis.retrofit` says.

    Args:
        config: the run.
        model: its model; what does not learn is frozen.
    """
    from twoaxis.training.groups import make_groups

    multipliers: dict[str, float] | None = None
    if config.source is not None:
        from twoaxis.pretrained.groups import RATES, parameter_roles, trainable
        from twoaxis.pretrained.record import record_of

        trainable(model, [word.strip() for word in config.train.split(",") if word.strip()])
        if record_of(model) is not None:
            multipliers = {name: RATES[role] for name, role in parameter_roles(model).items()}
    elif config.train != "all":
        raise ValueError(f"train={config.train} chooses from a saved model; name one with from")
    return make_groups(model, multipliers)


def source_digest(source: str) -> str:
    """Stands for the files of a saved model: a run is not taken up when they have changed."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted([*Path(source).glob("*.safetensors"), Path(source) / "config.json"]):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
