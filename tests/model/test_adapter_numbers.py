"""Streams read from foreign checkpoints compute what the originals compute.

The originals are transformers' own modules, the package of hyper-connections, the golden files put under the original
names, and plain re-computations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.golden_formats.base import FORWARD, Golden, rms_norm, stacked, tanh_of, trace
from tests.golden_formats.deep_delta import options as deep_delta_options
from tests.golden_formats.deep_delta import original_state
from tests.model import adapter_samples as samples
from tests.model.adapter_samples import WIDTH, Draw
from twoaxis.model.originals import read_stream, to_original

GOLDENS = Path(__file__).parents[1] / "goldens"


def goldens(pattern: str) -> Any:
    files = sorted(GOLDENS.glob(pattern))
    assert files, pattern
    return pytest.mark.parametrize("path", files, ids=[f.stem for f in files])


def toys(count: int, dtype: torch.dtype = torch.float64) -> list[Callable[[Tensor], Tensor]]:
    draw = Draw(20, dtype)
    return [tanh_of(draw(WIDTH, WIDTH)) for _ in range(count)]


def close(ours: Tensor, theirs: Tensor, bound: float = FORWARD) -> None:
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


# Kimi-K3, in the delayed form: a finished sum rides along until the next block's first read is done.


def delayed_bank(sample: samples.Sample, x: Tensor, functions: list[Callable[[Tensor], Tensor]], size: int) -> Tensor:
    model, eps = "language_model.model.", sample.config["rms_norm_eps"]

    def site(name: str, sources: list[Tensor]) -> Tensor:
        query, scale = (sample.tensors[f"{model}{name}_{leaf}.weight"] for leaf in ("proj", "norm"))
        logits = torch.stack([(rms_norm(scale, eps)(v) @ query.mT).squeeze(-1) for v in sources])
        return (logits.softmax(0).unsqueeze(-1) * torch.stack(sources)).sum(0)

    bank: list[Tensor] = []
    prefix: Tensor | None = x
    for i in range(len(functions) // 2):
        assert prefix is not None
        h = site(f"layers.{i}.self_attention_res", [*bank, prefix]) if bank else prefix
        if i % size == 0:
            bank.append(prefix)
            prefix = None
        y = functions[2 * i](h)
        prefix = y if prefix is None else prefix + y
        prefix = prefix + functions[2 * i + 1](site(f"layers.{i}.mlp_res", [*bank, prefix]))
    assert prefix is not None
    return site("output_attn_res", [*bank, prefix])


@pytest.mark.parametrize("evaluation", ["direct", "two_phase"])
@pytest.mark.parametrize(("blocks", "size"), [(1, 1), (5, 1), (5, 2), (6, 3), (5, 12)])
def test_kimi_k3(blocks: int, size: int, evaluation: str) -> None:
    sample = samples.kimi_k3(blocks, size)
    stream = read_stream(sample.tensors, config=sample.config, evaluation=evaluation).build()
    functions, x = toys(2 * blocks), Draw(21)(2, 3, WIDTH)
    close(trace(stream, x, functions)[0], delayed_bank(sample, x, functions, size))


# DeepSeek-V4 and GLM-5, their configurations and files; what they compute: test_shipped_residuals.py.


def test_deepseek_v4(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.model.tiny_families import tiny_config

    model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v4", hc_mult=3, hc_sinkhorn_iters=5, hc_eps=1e-3))
    adapted = read_stream(model.state_dict(), config=model.config)
    assert (adapted.family, adapted.blocks, adapted.width) == ("deepseek_v4", 3, 32)
    assert [adapted.options[name] for name in ("streams", "iterations", "sinkhorn_eps")] == [3, 5, 1e-3]
    # files are spelt in another way than modules
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any("hc_attn_fn" in key for key in saved)
    again = read_stream(saved, config=json.loads((tmp_path / "config.json").read_text()))
    assert again.options == adapted.options
    assert all(torch.equal(again.state[name], t) for name, t in adapted.state.items())
    # and the way back loads into the model
    written = to_original(adapted.build(), prefix="model.")
    assert set(written) <= set(model.state_dict())
    assert all(torch.equal(model.state_dict()[key], t) for key, t in written.items())


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tensors = samples.deepseek_v4(streams=4).tensors
    assert read_stream(tensors).options == read_stream(tensors, config=transformers.DeepseekV4Config()).options
    configuration = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next")
    tensors = samples.deepseek_v4(streams=4, head=False).tensors
    whole = read_stream(tensors, "glm5_next", config=configuration.Glm5NextTextConfig(hc_mult=4)).options
    assert read_stream(tensors, "glm5_next").options == whole


# The golden files under the original names.


@goldens("muddformer_[!j]*.npz")
def test_muddformer(path: Path) -> None:
    g = Golden(path)
    blocks = len(g.tensor("toy.A"))
    tensors = {}
    for i in range(blocks):
        tensors[f"model.dynamic_dense.{i}.w1.weight"] = g.tensor(f"da{i}.w1").mT
        tensors[f"model.dynamic_dense.{i}.w2.weight"] = g.tensor(f"da{i}.w2").mT
        tensors[f"model.dense_bs.{i}"] = g.tensor(f"da{i}.a")
    sizes = {name: bool(g.number(f"cfg.{name}")) for name in ("expand_last", "round64")}
    adapted = read_stream(tensors, config={"norm_eps": g.number("cfg.norm_eps"), **sizes})
    assert adapted.options["ways"] == {1: "one", 4: "qkvr"}[g.number("cfg.ways")]

    def attention(b: int, *ways: Tensor) -> Tensor:
        read = ways * 3 if len(ways) == 1 else ways
        return torch.tanh(sum(x @ g.tensor(f"toy.{t}")[b] for t, x in zip("ABC", read, strict=True)))  # pyright: ignore[reportArgumentType]

    functions: list[Callable[..., Tensor]] = []
    for b in range(blocks):
        functions += [lambda *ways, b=b: attention(b, *ways), tanh_of(g.tensor("toy.M")[b])]
    g.equal("out", trace(adapted.build(), g.tensor("x0"), functions)[0])


@goldens("denseformer-*.npz")
def test_denseformer(path: Path) -> None:
    g = Golden(path)
    blocks, w = g.number("L"), g.tensor("W")
    tensors = {f"dwa.alphas.{i}.weight": g.tensor(f"alpha_{i}")[None] for i in range(blocks) if g.arrays["has_dwa"][i]}
    config = {"n_blocks": blocks, "dilation": g.number("dilation"), "period": g.number("period")}
    stream = read_stream(tensors, config=config).build(width=w.shape[-1], kinds=("mlp",))
    sublayers = [lambda x, i=i: torch.tanh(x @ w[i]) - x for i in range(blocks)]
    g.equal("out", trace(stream, g.tensor("x0"), sublayers)[0])


@pytest.mark.parametrize(("groups", "dilation", "period"), [(4, 1, 1), (4, 2, 3), (3, 1, 2), (5, 3, 2), (2, 7, 2)])
def test_denseformer_of_the_experiments(groups: int, dilation: int, period: int) -> None:
    """History of group outputs, dilation counted in groups."""
    sample = samples.denseformer_experiments(groups, dilation, period)
    stream = read_stream(sample.tensors, config=sample.config).build(width=WIDTH, kinds=("mlp",))
    functions, x = toys(groups * period), Draw(25)(2, 3, WIDTH)
    y, history = x, [x]
    for r in range(1, groups + 1):
        for fn in functions[(r - 1) * period : r * period]:
            y = y + fn(y)
        history.append(y)
        slots = history[r % dilation :: dilation]
        y = sum(a * h for a, h in zip(sample.tensors[f"weights.{r - 1}.weight"][0], slots, strict=True))
        assert isinstance(y, Tensor)
    close(trace(stream, x, functions)[0], y)


@pytest.mark.parametrize("newer", [False, True])
@goldens("ddl_*.npz")
def test_deep_delta(path: Path, newer: bool) -> None:
    g = Golden(path)
    meta = json.loads(str(g.arrays["meta"]))
    w, norm_weight, d = g.tensor("W"), g.tensor("norm_weight"), g.tensor("x0").shape[-1]
    tensors: dict[str, Tensor] = {}
    for row in range(len(w)):
        base = f"transformer.h.{row // 2}.{('ddl_attn', 'ddl_mlp')[row % 2]}"
        gate = "beta_out" if "beta_in_weight" in g else "beta"
        if gate == "beta_out":
            tensors[f"{base}.beta_in.weight"] = g.tensor("beta_in_weight")[row]
        tensors[f"{base}.{gate}.weight"] = g.tensor("beta_weight")[row : row + 1]
        tensors[f"{base}.{gate}.bias"] = g.tensor("beta_bias")[row : row + 1]
        tensors[f"{base}.v_proj.weight"] = g.tensor("v_weight")[row]
        tensors[f"{base}.v_proj.bias"] = g.tensor("v_bias")[row]
    if meta["dv"] > 1:
        by_token = meta["variant"].startswith("TC")
        pairs = [(f"transformer.h.{b}.compress", g.tensor("compress_weight")[b]) for b in range(len(w) // 2)]
        reads = [*g.tensor("compress_read"), g.tensor("readout_read")]
        for (base, weight), read in zip([*pairs, ("readout", g.tensor("readout_weight"))], reads, strict=True):
            # later files of the original keep the taps of TC in a dimension of their own
            flat = by_token and not newer
            tensors[f"{base}.shortconv.weight" if flat else f"{base}.weight"] = weight.flatten(0, 1) if flat else weight
            tensors[f"{base}.read"] = read
    if "ec_weight" in g:
        tensors["input_embed.conv.weight"] = g.tensor("ec_weight").flatten(0, 1).unsqueeze(1)
    constant = "ddl_v_constant" if meta["dv"] > 1 else "ddl_v_dim1_constant"
    config = {
        "ddl_k_eps": meta["k_eps"],
        "ddl_v_sigmoid": meta["v_mode"] == "sigmoid",
        "ddl_v_sigmoid_scale": meta["v_scale"],
        constant: meta["v_mode"] == "const",
        f"{constant}_value": meta["v_const"],
    }
    adapted = read_stream(tensors, config=config)
    expected = deep_delta_options(g, meta, d)
    assert expected.items() <= (adapted.options | {"channel_padding": "same"} | _only_wide(meta)).items()
    norms = [rms_norm(scale, meta["norm_eps"]) for scale in norm_weight]
    out, steps, _ = trace(adapted.build(), g.tensor("x0"), [tanh_of(m) for m in w], norms)
    g.equal("state", stacked(steps, lambda s: original_state(s["state"])))
    g.equal("out", out)


def _only_wide(meta: dict[str, Any]) -> dict[str, Any]:
    """What an expanded state without EC leaves at its default."""
    return {"expand": "repeat"} if meta["dv"] > 1 and not meta["variant"].endswith("EC") else {}


@goldens("hc_*.npz")
def test_hyper_connections(path: Path) -> None:
    g = Golden(path)
    meta = json.loads(str(g.arrays["meta"]))
    names = ("static_alpha", "static_beta", "ln_weight", "ln_bias")
    dynamic = [f"dynamic_{what}_{leaf}" for what in ("alpha", "beta") for leaf in ("fn", "scale")]
    tensors = {f"hc.{name}": g.tensor(name) for name in (*names, *dynamic) if name in g}
    adapted = read_stream(tensors, config=meta)
    assert adapted.options["dynamic"] == meta["dynamic"]
    w = g.tensor("W")
    out, steps, _ = trace(adapted.build(width=w.shape[-1]), g.tensor("x0"), [tanh_of(m) for m in w])
    g.equal("state", stacked(steps, lambda s: s["state"].value.h))
    g.equal("out", out)


# The package of hyper-connections, its modules in a model of one's own.


@pytest.mark.parametrize("tanh", [True, False])
def test_hyper_connections_package(tanh: bool) -> None:
    package = pytest.importorskip("hyper_connections")
    streams, count = 3, 11
    made = [package.HyperConnections(streams, dim=WIDTH, layer_index=i, tanh=tanh) for i in range(count)]
    layers = nn.ModuleList(nn.ModuleDict({"residual": module}) for module in made).double()
    draw = Draw(26)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(draw(*parameter.shape))
    stream = read_stream(layers.state_dict(prefix="net.layers."), config={"tanh": tanh}).build()
    assert len(stream.sites) == count
    functions, x = toys(count), Draw(27)(2, 3, WIDTH)
    expand, reduce = package.HyperConnections.get_expand_reduce_stream_functions(streams)
    h = expand(x)
    for module, fn in zip(made, functions, strict=True):
        branch, add = module(h)
        h = add(fn(branch))
    close(trace(stream, x, functions)[0], reduce(h))
