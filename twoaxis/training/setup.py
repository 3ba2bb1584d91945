"""From the configuration of a run to its model and optimiser. What cannot be made is refused before data is read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import user_path
from twoaxis.base.registry import Registry, parse, spell, spell_value
from twoaxis.depth.registry import STREAMS
from twoaxis.model.variant import make_contender
from twoaxis.sequence.registry import MIXERS
from twoaxis.training.config import TrainConfig

if TYPE_CHECKING:
    import torch

    from twoaxis.model.config import ModelConfig
    from twoaxis.model.decoder import Model
    from twoaxis.model.graft_config import TwoAxisConfig

ANY = 2**20
"""Stands for a vocabulary that is not known yet."""


def resolve(run: TrainConfig) -> TrainConfig:
    """A run with the names that its methods are registered under, and with its tokenizer.

    One that starts from a saved model uses the tokenizer beside it unless another is named.
    """
    run = dataclasses.replace(
        run, stream=_canonical("stream", run.stream, STREAMS), mixer=_canonical("mixer", run.mixer, MIXERS)
    )
    run = dataclasses.replace(run, **with_family({"family": run.family, "model": run.model}))
    if run.source is None:
        return run
    from twoaxis.data.tokenizer import has_tokenizer, trained_on_bytes

    source = _check_source(run, run.source)
    run = dataclasses.replace(run, source=source)
    if not run.tokenizer.startswith("bpe:") or run.data[0].startswith("task:"):
        return run
    on_bytes = trained_on_bytes(source)
    if user_path(source).exists() and not on_bytes and not has_tokenizer(source):
        raise ValueError(f"{run.source} has no tokenizer; name the one its model was trained with, such as bytes")
    if run.tokenizer != TrainConfig.tokenizer:
        raise ValueError(
            f"tokenizer {run.tokenizer} would be trained anew, and the model in {run.source} knows nothing of its "
            "tokens; leave it out to use the model's own"
        )
    return dataclasses.replace(run, tokenizer="bytes" if on_bytes else source)


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


def with_family(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a run in which a config.json is read: the family and its fields stand there by themselves."""
    family = fields.get("family")
    if not isinstance(family, str):
        return fields
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from twoaxis.model.graft_from_scratch import is_file, read_family

    if not is_file(family):
        return fields
    name, own = read_family(family)
    if fields.get("preset", TrainConfig.preset) != TrainConfig.preset:
        raise ValueError(f"preset {fields['preset']} and {family} are two shapes; leave out one")
    return fields | {"family": name, "model": own | fields.get("model", {})}


def check(run: TrainConfig, vocabulary: int | None = None) -> None:
    """Refuse a run whose model cannot be made, also before its data is read, which may take long.

    `vocabulary` is the number of tokens of its data; None where they are not known yet.
    """
    if run.source is not None:
        _check_source(run, run.source)
        return
    model_config(run, run.model.get("vocab_size", ANY) if vocabulary is None else vocabulary)
    if run.train != "all":
        raise ValueError(f"train={run.train} chooses from a saved model; name one with from")


def _check_source(run: TrainConfig, source: str) -> str:
    """Refuse a source that is no model, and what cannot be chosen with it; its weights are not read yet.

    Returns where it is; of a run of ours, that is its model.
    """
    from twoaxis.model.load import check_folder
    from twoaxis.pretrained.model_for_training import check_method, is_ours

    for name in ("preset", "family"):
        if getattr(run, name) != getattr(TrainConfig, name):
            raise ValueError(f"{name} cannot be chosen with a model to begin from ({source}): its shape is its own")
    if not is_ours(source):
        found, _ = check_method(source, run.stream, run.mixer, run.model)
        _check_context(run, source, found.config.get_text_config(decoder=True))
        if run.model.get("lora") and run.parallel is not None:
            raise ValueError(f"model.lora is for whole models, parallel is {run.parallel}; leave out either")
        return source
    place = str(check_folder(source))
    given = [name for name in ("stream", "mixer") if getattr(run, name) != getattr(TrainConfig, name)]
    given += ["model"] if run.model else []
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be chosen with a model to go on from ({source}), which has its own; "
            "leave out either"
        )
    return place


def model_config(run: TrainConfig, vocabulary: int, end: int | None = None) -> ModelConfig | TwoAxisConfig:
    """The configuration of a run's model: a decoder's, or that of a family with the methods in it.

    A model may have more tokens than its data, never fewer; `end` is the token at which generating stops.
    """
    from twoaxis.model.presets import preset, preset_fields

    methods, known = make_contender(run.stream, run.mixer).model_fields(), preset_fields(run.preset)
    positions = max(run.context, known.get("max_position_embeddings", 0))
    fields: dict[str, Any] = {"vocab_size": vocabulary, "max_position_embeddings": positions}
    if end is not None:
        fields["eos_token_id"] = end
    fields |= run.model
    if isinstance(fields["vocab_size"], int) and fields["vocab_size"] < vocabulary:
        raise ValueError(f"the data has {vocabulary} tokens, model.vocab_size is {fields['vocab_size']}")
    if run.family is not None:
        from twoaxis.model.config import Methods
        from twoaxis.model.graft_from_scratch import on_meta, scratch_config

        own = {field.name for field in dataclasses.fields(Methods)}
        chosen = Methods.from_dict(methods | {n: value for n, value in fields.items() if n in own}, "a model")
        said = {name: value for name, value in fields.items() if name not in own}
        made = scratch_config(run.family, known, said, chosen, context=run.context)
        on_meta(made)
        return made
    config = preset(run.preset, **methods | fields)
    config.check_stream()
    return config


def make_model(run: TrainConfig, vocabulary: int, end: int | None = None) -> Model:
    """The model of a run before its first step, in float32 on the CPU; parameters that do not learn are frozen.

    All runs of one `init_seed` share the initial values of everything their models have in common.
    """
    check(run)
    if run.source is not None:
        model = _load(run, run.source, vocabulary)
    else:
        config: Any = model_config(run, vocabulary, end)
        seed = run.seed if run.init_seed is None else run.init_seed
        if run.family is None:
            from twoaxis.model.decoder import Decoder

            model = Decoder(config, seed)
        else:
            from twoaxis.model.graft_from_scratch import from_scratch

            model = from_scratch(config, seed)
    if run.recompute:
        model.activation_checkpointing_enable(every_n_layers=run.recompute)
    return model


def _load(run: TrainConfig, source: str, vocabulary: int) -> Model:
    """The saved model that a run starts from."""
    from twoaxis.model.groups import trainable
    from twoaxis.model.load import load_model
    from twoaxis.pretrained.model_for_training import begin, is_ours, words
    from twoaxis.pretrained.record import new_parameters

    ours, seed = is_ours(source), run.seed if run.init_seed is None else run.init_seed
    model: Any = (
        load_model(source, "cpu").float()
        if ours
        else begin(source, stream=run.stream, mixer=run.mixer, fields=run.model, train=run.train, seed=seed)
    )
    if model.config.vocab_size < vocabulary:
        raise ValueError(
            f"the data has {vocabulary} tokens, the model in {source} {model.config.vocab_size}: use its own tokenizer"
        )
    _check_context(run, source, model.config)
    if ours:
        for parameter in model.parameters():  # out of the mapped file, see `twoaxis.pretrained.model_for_training`
            parameter.data = parameter.data.clone()
        named = words(run.train)
        trainable(model, named, new=new_parameters(model) if "new" in named else ())
    return model


def _check_context(run: TrainConfig, source: str, config: Any) -> None:
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and most < run.context:
        raise ValueError(f"context is {run.context}, the model in {source} is made for {most}")


def make_optimizer(run: TrainConfig, model: Any) -> torch.optim.AdamW:
    """AdamW over the parameters that learn, fused where the device has it.

    In a retrofitted model pretrained matrices learn more slowly than what is new.
    """
    import torch

    from twoaxis.model.groups import param_groups
    from twoaxis.pretrained.record import is_retrofit, learning_rates

    rates = learning_rates(model, {"new": run.new_rate}) if run.source is not None and is_retrofit(model) else None
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
