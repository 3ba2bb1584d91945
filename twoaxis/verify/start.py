"""Claims about where a method starts: initial and neutral values, Blend, and the dtypes it runs in."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from twoaxis.depth.blend import Blend
from twoaxis.depth.stream import Stream
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder, norm_name
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.verify.claim import Axis, Result, accepted, claim, deviation
from twoaxis.verify.depth import ways_of
from twoaxis.verify.subject import MixerSubject, Run, StreamSubject, Subject, build, runs, stepping

NEUTRAL_BOUND = {"bitwise": 0.0, "rounding": 1e-12, "scale": 1e-10}
DTYPE_BOUND = {torch.float64: 0.0, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""How far an output may be from float64's, relative to its largest entry."""
NO_NEUTRAL, REFUSED = "none declared", "refused, with the reason"
"""What the row of a method says that has no neutral parameters, or that a blend cannot take."""


@claim("start", "start: every parameter is set", over=runs())
@torch.no_grad()
def starts(run: Run) -> list[str]:
    """reset_parameters sets every parameter, and to the same numbers for one generator."""
    values = []
    for _ in range(2):
        for parameter in run.method.parameters():
            parameter.fill_(float("nan"))
        run.method.reset_parameters(generator=torch.Generator().manual_seed(run.seed))
        values.append({name: p.clone() for name, p in run.method.named_parameters()})
    unset = {name for name, value in values[0].items() if not torch.isfinite(value).all()}
    drawn = [name for name in values[0].keys() - unset if not torch.equal(values[0][name], values[1][name])]
    found = [f"{name} is not set" for name in sorted(unset)]
    return found + [f"{name} is drawn from another generator than the one given" for name in sorted(drawn)]


# Neutral parameters and Blend, in decoders.


def plain_beside(model: Decoder, config: ModelConfig, seed: int, axis: Axis = "depth") -> Decoder:
    """The decoder without its method along an axis; `model` gets everything else from it.

    A pre-norm's scale goes into every way; a stream that normalises its own reads adopts the scales.
    """
    without: dict[str, Any] = {"mixer": None, "mixer_options": {}, "mixer_blocks": None}
    if axis == "depth":
        without = {"stream": "standard", "stream_options": {}, "placement": None}
    plain = build(dataclasses.replace(config, **without), seed)
    share_weights(plain, model)
    return plain


def share_weights(plain: Decoder, model: Decoder) -> None:
    """Copy everything but the stream from `plain` into `model`."""
    theirs = dict(plain.named_parameters())
    own = model.stream.method if isinstance(model.stream, Blend) else model.stream
    with torch.no_grad():
        for site in own.layout.sites if type(plain.stream) is not type(own) else ():
            if not own.normed(site):
                own.adopt_norm_(site, theirs[norm_name(site)])
        for name, parameter in model.named_parameters():
            if name in theirs and not name.startswith("stream."):
                parameter.copy_(theirs[name].expand_as(parameter))


@claim("neutral", "neutral class", ["depth"])
@torch.no_grad()
def neutral_class(subject: StreamSubject) -> dict[str, Result] | list[str] | str:
    """At its neutral parameters the method is as plain as its class says; a class of none has no such parameters."""
    found: dict[str, Result] = {}
    for where, config in subject.configs():
        model = build(config, subject.seed, perturb=0.1)
        kind = model.stream.neutral
        if kind == "none":
            return accepted("the neutral class is none, and neutral_()", model.stream.neutral_) or NO_NEUTRAL
        if not all(map(model.stream.normed, model.stream.layout.sites)):  # it has the epsilon of the norms itself
            config = dataclasses.replace(config, rms_norm_eps=model.stream.config.eps or config.rms_norm_eps)
        if kind == "scale":  # equal up to the pre-norm's epsilon: without one it is equal to rounding
            config = dataclasses.replace(config, rms_norm_eps=1e-60)
            model = build(config, subject.seed, perturb=0.1)
        model.stream.neutral_()
        plain, tokens = plain_beside(model, config, subject.seed), stepping(model, subject.seed).inputs()
        found[where] = Result(deviation(model(tokens), plain(tokens)), NEUTRAL_BOUND[kind], kind)
    return found


@claim("neutral", "neutral mixer", ["sequence"])
@torch.no_grad()
def neutral_mixer(subject: MixerSubject) -> dict[str, float] | str:
    """At neutral parameters a decoder with the mixer is the one without it, to the last bit."""
    errors = {}
    for where, config in subject.configs():
        if config.stream != "standard":
            continue  # a stream that tells sub-layers apart sees one more, whatever its output
        model = build(config, subject.seed, perturb=0.1)
        operators: list[Any] = [module for module in model.modules() if isinstance(module, subject.cls)]
        if any(operator.neutral == "none" for operator in operators):
            return NO_NEUTRAL
        for operator in operators:
            operator.neutral_()
        plain, tokens = plain_beside(model, config, subject.seed, "sequence"), stepping(model, subject.seed).inputs()
        errors[where] = deviation(model(tokens), plain(tokens))
    return errors


@claim("blend", "blend: gate 0 = plain, gate 1 = the method", ["depth"])
@torch.no_grad()
def blend(subject: StreamSubject) -> dict[str, float] | list[str] | str:
    """To the last bit the decoder is the plain one behind closed gates, and the method's behind open ones."""
    errors = {}
    for where, config in subject.configs():
        method = build(config, subject.seed, perturb=0.1)
        if method.stream.unblendable() is not None:
            return accepted("a blend of a method that says why it cannot be blended", Blend, method.stream) or REFUSED
        blended = build(dataclasses.replace(config, blend=True), subject.seed)
        assert isinstance(blended.stream, Blend)
        blended.stream.method.load_state_dict(method.stream.state_dict())
        plain, tokens = plain_beside(blended, config, subject.seed), stepping(method, subject.seed).inputs()
        errors[f"{where}, gate 0"] = deviation(blended(tokens), plain(tokens))
        blended.stream.gate.fill_(1.0)
        share_weights(method, blended)
        errors[f"{where}, gate 1"] = deviation(blended(tokens), method(tokens))
    return errors


# Dtypes.


@claim("start", "dtypes", bound=1.0)
@torch.no_grad()
def dtypes(subject: Subject) -> dict[str, float] | list[str]:
    """Reads and outputs keep the dtype of the input, and stay near float64's numbers; measured in parts of the bound.

    In bfloat16 twice: with every parameter in bfloat16, and with those in float32 that `parameter_groups` keeps there.
    """
    found, errors = [], {}
    exact = {run.where: run(run.input()) for run in subject.runs(layouts="few")}
    for dtype, keeping in ((d, k) for d in DTYPE_BOUND for k in (False, True) if not k or d == torch.bfloat16):
        for run in subject.runs(dtype=dtype, layouts="few"):
            x = run.input().to(dtype)
            if isinstance(run.method, Stream):
                for name in (n for g in run.method.parameter_groups() if g.float32 and keeping for n in g.names):
                    parameter = run.method.get_parameter(name)
                    parameter.data = parameter.data.float()
                for step in run.steps(x)[0]:
                    wrong = [f"{way} in {t.dtype}" for way, t in ways_of(step.seen).items() if t.dtype != dtype]
                    found += [f"{run.where}: site {step.site.index} reads {w} of {dtype}" for w in wrong]
            out = run(x)
            if out.dtype != dtype or not torch.isfinite(out).all():
                found.append(f"{run.where}: the output is {out.dtype} of {dtype}, or not finite")
            if DTYPE_BOUND[dtype]:
                errors[f"{run.where}, {dtype}"] = deviation(out.double(), exact[run.where]) / DTYPE_BOUND[dtype]
    return found or errors


@claim("start", "bfloat16 autocast", over=runs(dtype=torch.float32, layouts="few"), bound=DTYPE_BOUND[torch.bfloat16])
def autocast(run: Run) -> float:
    """Under bfloat16 autocast a stream stays in float32; output and gradients are finite, the output near float32's."""
    x = run.input().float().requires_grad_()
    with torch.no_grad():
        exact = run(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(x)
    grads = torch.autograd.grad(out.float().square().sum(), run.leaves(x), allow_unused=True)
    finite = all(bool(torch.isfinite(grad).all()) for grad in grads if grad is not None)
    wide = out.dtype == torch.float32 or isinstance(run.method, LocalOperator)
    return deviation(out.float(), exact) if finite and wide else float("inf")
