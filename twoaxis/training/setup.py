"""From the configuration of a run to its model and optimiser. What cannot be made is refused before data is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import file_sha256
from twoaxis.base.registry import Registry
from twoaxis.base.spec import parse, spell, spell_value
from twoaxis.depth.registry import STREAMS
from twoaxis.model.variant import make_contender
from twoaxis.sequence.registry import MIXERS
from twoaxis.training.config import TrainConfig

if TYPE_CHECKING:
    import torch

    from twoaxis.model.config import ModelConfig
    from twoaxis.model.running import Model

ANY = 2**20
"""Stands for a vocabulary that is not known yet."""


def resolve(run: TrainConfig) -> TrainConfig:
    """A run with the names that its methods are registered under, and with its tokenizer.

    One that starts from a saved model uses the tokenizer beside it unless another is named.
    """
    run = dataclasses.replace(
        run, stream=_canonical("stream", run.stream, STREAMS), mixer=_canonical("mixer", run.mixer, MIXERS)
    )
    if run.source is None or not run.tokenizer.startswith("bpe:") or run.data[0].startswith("task:"):
        return run
    from twoaxis.data.tokenizer import has_tokenizer
    from twoaxis.model.load import check_folder

    check_folder(run.source)
    if not has_tokenizer(run.source):
        raise ValueError(f"{run.source} has no tokenizer; name the one its model was trained with, such as bytes")
    if run.tokenizer != TrainConfig.tokenizer:
        raise ValueError(
            f"tokenizer {run.tokenizer} would be trained anew, and the model in {run.source} knows nothing of its "
            "tokens; leave it out to use the model's own"
        )
    return dataclasses.replace(run, tokenizer=run.source)


def _canonical(place: str, spelling: Any, registry: Registry[Any]) -> Any:
    """The spelling of a method with its name in place of an alias; fields of a run inside it are refused."""
    if spelling is None:
        return None
    given = parse(spelling)[1]
    for key, value in given.items():
        if key == "label":
            raise ValueError(f"{place} {spelling} has a label, which names a row of a comparison: leave it out")
        word, _, field = key.partition(".")
        if word == "train":
            option = field.replace("_", "-")
            if isinstance(value, bool):
                option = option if value else f"no-{option}"
            else:
                option = f"{option} {spell_value(value)}"
            raise ValueError(f"{place} {spelling} sets {key}, which only a comparison takes there: give --{option}")
    name, colon, rest = spelling.partition(":")
    full, options = registry.expand(name.strip(), given)
    return full + colon + rest if options == given else spell(full, options)


def check(run: TrainConfig, vocabulary: int | None = None) -> None:
    """Refuse a run whose model cannot be made, also before its data is read, which may take long.

    Args:
        run: the run.
        vocabulary: tokens of its data; None where they are not known yet.
    """
    if run.source is None:
        model_config(run, run.model.get("vocab_size", ANY) if vocabulary is None else vocabulary)
        if run.train != "all":
            raise ValueError(f"train={run.train} chooses from a saved model; name one with from")
        return
    from twoaxis.model.load import check_folder

    check_folder(run.source)
    given = [name for name in ("preset", "stream", "mixer") if getattr(run, name) != getattr(TrainConfig, name)]
    given += ["model"] if run.model else []
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be chosen with a model to go on from ({run.source}), which has its own; "
            "leave out either"
        )


def model_config(run: TrainConfig, vocabulary: int, end: int | None = None) -> ModelConfig:
    """The configuration of a run's model.

    Args:
        run: the run.
        vocabulary: tokens of its data. A model may have more, never fewer.
        end: the token that ends a document, where generating stops.
    """
    from twoaxis.model.presets import preset, preset_fields

    fields: dict[str, Any] = {"vocab_size": vocabulary, **make_contender(run.stream, run.mixer).model_fields()}
    known = preset_fields(run.preset)
    fields["max_position_embeddings"] = max(run.context, known.get("max_position_embeddings", 0))
    if end is not None:
        fields["eos_token_id"] = end
    fields |= run.model
    if isinstance(fields["vocab_size"], int) and fields["vocab_size"] < vocabulary:
        raise ValueError(f"the data has {vocabulary} tokens, model.vocab_size is {fields['vocab_size']}")
    config = preset(run.preset, **fields)
    config.check_stream()
    return config


def make_model(run: TrainConfig, vocabulary: int, end: int | None = None) -> Model:
    """The model of a run before its first step, in float32 on the CPU; parameters that do not learn are frozen.

    All runs of one `init_seed` share the initial values of everything their models have in common.

    Args:
        run: the run.
        vocabulary: tokens of its data.
        end: the token that ends a document.
    """
    check(run)
    if run.source is not None:
        model = _load(run, run.source, vocabulary)
    else:
        from twoaxis.model.decoder import Decoder

        model = Decoder(model_config(run, vocabulary, end), run.seed if run.init_seed is None else run.init_seed)
    if run.recompute:
        model.gradient_checkpointing_enable(every_n_layers=run.recompute)
    return model


def _load(run: TrainConfig, source: str, vocabulary: int) -> Model:
    """The saved model that a run starts from."""
    from twoaxis.model.groups import trainable
    from twoaxis.model.load import load_model
    from twoaxis.pretrained.record import new_parameters

    model: Any = load_model(source, "cpu").float()
    if model.config.vocab_size < vocabulary:
        raise ValueError(
            f"the data has {vocabulary} tokens, the model in {source} {model.config.vocab_size}: use its own tokenizer"
        )
    if model.config.max_position_embeddings < run.context:
        raise ValueError(
            f"context is {run.context}, the model in {source} is made for {model.config.max_position_embeddings}"
        )
    # Weights lie in the mapped file, at the file's alignment: last bits of matrix products depend on that, and frozen
    # weights would change with a file that somebody rewrites during the run.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    words = [word.strip() for word in run.train.split(",") if word.strip()]
    trainable(model, words, new=new_parameters(model) if "new" in words else ())
    return model


def make_optimizer(run: TrainConfig, model: Any) -> torch.optim.AdamW:
    """AdamW over the parameters that learn, fused where the device has it.

    In a retrofitted model pretrained parameters learn more slowly than new ones.
    """
    import torch

    from twoaxis.model.groups import param_groups
    from twoaxis.pretrained.record import learning_rates, record_of

    rates = learning_rates(model) if run.source is not None and record_of(model) is not None else None
    groups = _by_mesh(param_groups(model, lr=run.lr, weight_decay=run.weight_decay, rates=rates))
    fused = {p.device.type for p in model.parameters()} <= {"cpu", "cuda", "mps", "xpu"}
    return torch.optim.AdamW(groups, lr=run.lr, betas=(run.beta1, run.beta2), eps=run.epsilon, fused=fused)


def _by_mesh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups whose parameters are spread over the same devices each, as a fused optimiser needs."""
    split: dict[tuple[int, Any], dict[str, Any]] = {}
    for number, group in enumerate(groups):
        for name, parameter in zip(group["names"], group["params"], strict=True):
            key = number, getattr(parameter, "device_mesh", None)
            part = split.setdefault(key, {**group, "params": [], "names": ()})
            part["params"].append(parameter)
            part["names"] += (name,)
    return list(split.values())


def source_digest(source: str | None) -> str | None:
    """Digest of the files of a saved model: a run is not resumed when they have changed."""
    import hashlib

    if source is None:
        return None
    digest = hashlib.sha256()
    for path in sorted([*Path(source).glob("*.safetensors"), Path(source) / "config.json"]):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()
