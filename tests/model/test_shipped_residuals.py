"""Residuals against the code they ship in: outputs and every gradient, through their own names.

transformers' DeepSeek-V4, GLM-5, HY-V4, Qwen4-Exp, Muse-Spark, ZAYA and BEAM, and the package of hyper-connections.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twoaxis
from tests.model.adapter_samples import Draw
from twoaxis.depth.stream import Seen, Stream
from twoaxis.model.originals import read_stream, to_original

WIDTH, BLOCKS = 8, 2
SITES = ("attention", "mlp") * BLOCKS


def shipped(model: str) -> Any:
    """The module of one of transformers' models."""
    return pytest.importorskip(f"transformers.models.{model}.modeling_{model}")


def scatter(module: nn.Module, seed: int = 0) -> None:
    draw = Draw(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape))


def layers(*names: str, make: Callable[[], nn.Module], **beside: nn.Module) -> nn.ModuleDict:
    """A model with the stream's modules alone, and one module per name in each of its layers."""
    blocks = nn.ModuleList(nn.ModuleDict({name: make() for name in names}) for _ in range(BLOCKS))
    model = nn.ModuleDict({"layers": blocks, **beside}).double()
    scatter(model)
    return model


def modules(model: nn.ModuleDict, *names: str) -> list[Any]:
    """In the order of the sub-layers."""
    return [layer[name] for layer in model["layers"] for name in names]  # type: ignore[union-attr]


def sublayer(index: int, read: Tensor) -> Tensor:
    return torch.tanh(read @ Draw(30 + index)(WIDTH, WIDTH).to(read.dtype))


def through(stream: Stream, x: Tensor) -> Tensor:
    state = stream.open(x)
    for site in stream.sites:
        seen = stream.read(state, site)
        state = stream.write(state, site, sublayer(site.index, seen.x), seen, Seen(seen.x))
    return stream.close(state)


def agree(
    model: nn.Module, stream: Stream, run: Callable[[Tensor], Tensor], like: str | None, bound: float = 1e-10
) -> None:
    """The outputs, and the gradients of the input and of the model's parameters under the names of `like`."""
    x = Draw(40)(2, 3, WIDTH).to(next(model.parameters(), torch.zeros(0, dtype=torch.float64)).dtype)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, out = run(theirs), through(stream, ours)
    assert (out - want).abs().max() <= bound * want.abs().max()
    probe = Draw(41)(*want.shape).to(want.dtype)
    (want * probe).sum().backward()
    (out * probe).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert (ours.grad - theirs.grad).abs().max() <= 10 * bound * theirs.grad.abs().max()
    gradients = twoaxis.stream(stream.name, blocks=BLOCKS, width=WIDTH, **vars(stream.config)).to(x.dtype)
    for name, parameter in gradients.named_parameters():
        grad = stream.get_parameter(name).grad
        assert grad is not None, name
        parameter.data.copy_(grad)
    if like is None:
        return
    written = to_original(gradients, like)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert (written[key] - parameter.grad).abs().max() <= 10 * bound * (1 + parameter.grad.abs().max()), key


@pytest.mark.parametrize(("streams", "iterations", "eps"), [(4, 20, 1e-6), (2, 3, 1e-3), (3, 1, 1e-2)])
@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next"])
def test_deepseek_v4_and_glm5(family: str, streams: int, iterations: int, eps: float) -> None:
    """The second has no parameters in its head, and is not told from the first by its tensors."""
    code, glm = shipped(family), family == "glm5_next"
    prefix = "Glm5NextText" if glm else "DeepseekV4"
    sizes = {"hidden_size": WIDTH, "hc_mult": streams, "hc_sinkhorn_iters": iterations}
    config = SimpleNamespace(**sizes, hc_eps=eps, rms_norm_eps=1e-4)
    connection, head = getattr(code, f"{prefix}HyperConnection"), getattr(code, f"{prefix}HyperHead")
    beside = {} if glm else {"hc_head": head(config)}
    model = layers("attn_hc", "ffn_hc", make=lambda: connection(config), **beside).float()
    found = read_stream(model.state_dict(), family if glm else None, config=vars(config))
    assert found.family == family

    def run(x: Tensor) -> Tensor:
        h = x.unsqueeze(2).expand(-1, -1, streams, -1).contiguous()
        for i, module in enumerate(modules(model, "attn_hc", "ffn_hc")):
            post, comb, read = module(h)
            h = post.unsqueeze(-1) * sublayer(i, read).unsqueeze(-2) + comb.mT @ h
        return (head() if glm else model["hc_head"])(h)

    agree(model, found.build(), run, family, 5e-6)


@pytest.mark.parametrize(("streams", "magnitude", "eps"), [(4, 2.0, 1e-6), (3, 1.3, 1e-2)])
def test_hy_v4(streams: int, magnitude: float, eps: float) -> None:
    hy = shipped("hy_v4")
    config = SimpleNamespace(
        hidden_size=WIDTH,
        hc_mult=streams,
        hc_magnitude=magnitude,
        hc_eps=eps,
        rms_norm_eps=1e-4,
        initializer_range=0.02,
    )
    model = layers("attn_hc", "ffn_hc", make=lambda: hy.HYV4HyperConnection(config), hc_head=hy.HYV4HyperHead(config))
    model = model.float()  # it computes in float32 whatever it is given
    found = read_stream(model.state_dict(), config=vars(config))
    assert found.family == "hy_v4"

    def run(x: Tensor) -> Tensor:
        h = x.unsqueeze(2).expand(-1, -1, streams, -1)
        for i, module in enumerate(modules(model, "attn_hc", "ffn_hc")):
            post, read = module(h)
            h = post.unsqueeze(-1) * sublayer(i, read).unsqueeze(-2) + h
        return model["hc_head"](h)

    agree(model, found.build(), run, "hy_v4", 2e-6)


@torch.no_grad()
def test_hy_v4_starts_as_transformers_does() -> None:
    hy = shipped("hy_v4")
    config = SimpleNamespace(hidden_size=64, hc_mult=4, hc_magnitude=2.0, hc_eps=1e-6, rms_norm_eps=1e-5)
    theirs = hy.HYV4HyperConnection(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hy.PreTrainedModel, "_init_weights", lambda self, module: None)
        made = object.__new__(hy.HYV4PreTrainedModel)
        nn.Module.__init__(made)
        made.config = SimpleNamespace(initializer_range=0.02)
        made._init_weights(theirs)
    ours = twoaxis.stream("manifold_hyper_connections", blocks=1, width=64, form="hy_v4")
    assert torch.allclose(ours.base[0], theirs.base)
    assert torch.equal(ours.scale[0], theirs.scale)
    assert abs(ours.fn.std() / theirs.fn.std() - 1) < 0.05


@pytest.mark.parametrize(("streams", "rank"), [(4, 6), (3, 5)])
def test_qwen4_exp(streams: int, rank: int) -> None:
    qwen = shipped("qwen4_exp")
    config = SimpleNamespace(hidden_size=WIDTH, hc_count=streams, hc_lowrank=rank, rms_norm_eps=1e-4)
    names = ("attn_hyper_connection", "mlp_hyper_connection")
    out = qwen.Qwen4ExpTextGatedResidual(config, use_combine=False)
    model = layers(*names, make=lambda: qwen.Qwen4ExpTextGatedResidual(config), hyper_connection_mixer=out).float()
    found = read_stream(model.state_dict(), config=vars(config))
    assert (found.family, found.stream) == ("qwen4_exp", "gated_streams")

    def run(x: Tensor) -> Tensor:
        h = x.repeat(1, 1, streams)
        for i, module in enumerate(modules(model, *names)):
            read, h, gain = module(h)
            h = h + (sublayer(i, read).unsqueeze(-2) * gain.unsqueeze(-1)).flatten(-2)
        return model["hyper_connection_mixer"](h)

    agree(model, found.build(), run, "qwen4_exp", 2e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_muse_spark(temperature: float) -> None:
    muse = shipped("muse_spark")
    config = SimpleNamespace(hidden_size=WIDTH, residual_gate_temperature=temperature)
    names = ("post_attention_residual_gate", "post_feedforward_residual_gate")
    model = layers(*names, make=lambda: muse.MuseSparkResidualGate(config))
    found = read_stream(model.state_dict(), config=vars(config))
    assert (found.family, found.stream) == ("muse_spark", "scaled")

    def run(x: Tensor) -> Tensor:
        for i, gate in enumerate(modules(model, *names)):
            x = gate(x, sublayer(i, x))
        return x

    agree(model, found.build(), run, "muse_spark")


def test_zaya() -> None:
    zaya = shipped("zaya")
    names = ("post_attention_residual_scale", "post_mlp_residual_scale")
    model = layers(*names, make=lambda: zaya.ZayaResidualScaling(WIDTH))
    for name in ("scale", "bias"):
        model.register_parameter(f"input_hidden_states_{name}", nn.Parameter(Draw(8)(WIDTH)))
    found = read_stream(model.state_dict())
    assert (found.family, found.stream) == ("zaya", "scaled")

    def run(x: Tensor) -> Tensor:
        shift, scale = (model.get_parameter(f"input_hidden_states_{name}") for name in ("bias", "scale"))
        x = (x + shift) * scale
        for i, module in enumerate(modules(model, *names)):
            x = module(sublayer(i, x), x)
        return x

    agree(model, found.build(), run, "zaya")


def test_beam() -> None:
    beam = shipped("beam")

    def run(x: Tensor) -> Tensor:
        for i in range(len(SITES)):
            number = 2 * (i // 2 + 1) + i % 2  # as its layers count
            x = beam.depth_scaled_residual_add(sublayer(i, x), x, number)
        return x

    stream = twoaxis.stream("scaled", blocks=BLOCKS, width=WIDTH, form="schedule", post_norm=False).double()
    agree(nn.Module(), stream, run, None)


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize(("streams", "fractions"), [(4, None), (2, None), (1, 2), (1, 4), (2, 2), (3, 2)])
def test_the_package_s_hyper_and_frac_connections(streams: int, fractions: int | None, tanh: bool) -> None:
    """Its rows are slices first and streams second, its columns for each slice a read and then its streams.

    Its norm is an RMS norm without epsilon.
    """
    package = pytest.importorskip("hyper_connections.hyper_connections")
    n, m, options = streams, fractions or 1, {"streams": streams, "tanh": tanh, "norm": "rms", "eps": 0.0}
    options |= {} if fractions is None else {"fractions": m, "write": "all"}
    stream = twoaxis.stream("hyper_connections", blocks=BLOCKS, width=WIDTH, **options).double()
    theirs = [
        package.HyperConnections(n, dim=WIDTH, layer_index=i, num_fracs=m, tanh=tanh).double()
        for i in range(len(SITES))
    ]
    if fractions is None:
        assert all(torch.equal(module.static_alpha, stream.static_alpha[i]) for i, module in enumerate(theirs))
    for i, module in enumerate(theirs):
        scatter(module, i)
    rows = torch.arange(n * m).view(m, n).T.flatten()  # ours are streams first
    columns = torch.arange(m * (1 + n)).view(m, 1 + n)
    order = torch.cat([columns[:, 0], columns[:, 1:].T.flatten()])
    views: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
        "static_alpha": ("static_alpha", lambda t: t[rows][:, order]),
        "static_beta": ("static_beta", lambda t: t),
        "dynamic_alpha_fn": ("dynamic_alpha_fn", lambda t: t[:, order]),
        "dynamic_alpha_scale": ("dynamic_alpha_scale", lambda t: t),
        "dynamic_beta_fn": ("dynamic_beta_fn", lambda t: t),
        "dynamic_beta_scale": ("dynamic_beta_scale", lambda t: t),
        "norm.gamma": ("norm_weight", lambda t: t + 1),
    }
    with torch.no_grad():
        for name, (ours, view) in views.items():
            stream.get_parameter(ours).copy_(torch.stack([view(m.get_parameter(name)) for m in theirs]))
    expand, reduce = package.get_expand_reduce_stream_functions(n)

    def run(x: Tensor) -> Tensor:
        h = expand(x)
        for i, module in enumerate(theirs):
            read, add = module(h)
            h = add(sublayer(i, read))
        return reduce(h)

    agree(nn.ModuleList(theirs), stream, run, None)
    for name, (ours, view) in views.items():
        found = torch.stack([view(m.get_parameter(name).grad) for m in theirs])
        found = found - 1 if name == "norm.gamma" else found
        grad = stream.get_parameter(ours).grad
        assert grad is not None
        assert (grad - found).abs().max() <= 1e-9 * (1 + found.abs().max()), name


def test_hy_v4_files_are_spelt_in_another_way() -> None:
    model = twoaxis.stream("manifold_hyper_connections", blocks=2, width=WIDTH, form="hy_v4")
    spelt = to_original(model, "hy_v4", prefix="model.")
    files = {
        key.replace(".attn_hc.", ".hc_pre.hc_attn_layer.hc_")
        .replace(".ffn_hc.", ".hc_pre.hc_mlp_layer.hc_")
        .replace("hc_head.hc_", "hc_pre.hc_head.hc_head_"): tensor
        for key, tensor in spelt.items()
    }
    found = read_stream(files)
    assert found.family == "hy_v4"
    assert all(torch.equal(found.state[name], t) for name, t in model.state_dict().items())
