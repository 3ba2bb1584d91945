"""The plain stream inside every family: the untouched model to the last bit, to rounding, or refused by name."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

from tests.model.graft_helpers import METHODS, gradients
from tests.model.tiny_families import causal_types, limit, tiny
from twoaxis.model.graft import Refused, graft
from twoaxis.model.graft_survey import difference, sample

BITWISE = ("llama", "qwen3", "gemma3_text", "gemma4_text", "olmo2", "granite", "phi3", "mixtral", "gpt2", "qwen3_next")
BITWISE = (*BITWISE, "deepseek_v3", "gpt_neox", "doge", "opt", "bloom", "mamba")
REFUSED = {
    "bert": "BertLayer 0 returned a Tensor",
    "minimax": "MiniMaxDecoderLayer 0 returned a Tensor",
    "hy_v4": "HYV4DecoderLayer 0 cannot carry a stream",
    "xlm": "XLMWithLMHeadModel has no list",
}


def compare(family: str) -> tuple[str, str]:
    """How a graft with the plain stream stands to the untouched model, logits and the gradient of every parameter."""
    try:
        model = tiny(family)
        given = sample(model)
        before = gradients(model, given)
    except TimeoutError:
        raise
    except Exception as error:  # a family that a generic small configuration cannot build, or not run on tokens alone
        return "not built", f"{type(error).__name__}: {error}"
    try:
        made = graft(model)
    except Refused as error:
        return "refused", str(error)
    after = {name.removeprefix("backbone."): value for name, value in gradients(made, given).items()}
    assert set(after) == set(before)
    apart = max(difference(after[name], value) for name, value in before.items())
    said = made.config.architecture.exact
    return ("bitwise" if apart == 0.0 else "rounding" if apart < 1e-5 and said == "rounding" else "wrong"), str(apart)


def need(family: str) -> None:
    """Skip where the installed transformers is older than a family."""
    if family not in causal_types():
        pytest.skip(f"this transformers has no {family}")


@pytest.mark.parametrize("family", BITWISE)
def test_a_graft_is_the_untouched_model_to_the_last_bit(family: str) -> None:
    assert compare(family)[0] == "bitwise"


def test_two_additions_of_one_site_are_a_matter_of_rounding_and_said_so() -> None:
    assert compare("cohere")[0] == "rounding"


@pytest.mark.parametrize(
    ("family", "method"),
    [("doge", "denseformer"), ("gemma4_text", "hyper_connections"), ("beam", "deep_delta")],
)
def test_a_residual_that_layers_scale_carries_methods(family: str, method: str) -> None:
    need(family)
    model = tiny(family)
    for name, scale in model.named_buffers():
        if name.endswith("layer_scalar"):
            scale.fill_(0.7)
    with torch.no_grad():
        before = model(sample(model), use_cache=False).logits
        after = graft(model, **METHODS[method])(sample(model), use_cache=False).logits
    assert difference(after, before) < 1e-5


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_carry_a_stream_is_refused_by_the_layers_name(family: str) -> None:
    need(family)
    kind, why = compare(family)
    assert kind == "refused"
    assert why.startswith(REFUSED[family])


@pytest.mark.slow
def test_every_causal_type_is_bitwise_rounding_or_refused_by_name() -> None:
    found: dict[str, tuple[str, str]] = {}
    for family in causal_types():
        try:
            with limit(60):
                found[family] = compare(family)
        except TimeoutError as error:
            found[family] = ("not built", str(error))
    counts = Counter(kind for kind, _ in found.values())
    print(counts, {family: why for family, (kind, why) in found.items() if kind not in ("bitwise", "refused")})
    assert counts["wrong"] == 0, {family: why for family, (kind, why) in found.items() if kind == "wrong"}
    assert counts["bitwise"] >= 130
    for family, (kind, why) in found.items():
        if kind == "refused":
            assert any(word in why for word in ("residual", "layers", "cannot carry")), (family, why)


def test_the_proof_compares_with_logits_from_before_anything_was_touched() -> None:
    """A configuration that nests a live one overwrites its choice of attention: both sides attend without a mask."""
    model, given = tiny("llama"), sample(tiny("llama"))
    with torch.no_grad():
        before = model(given).logits
        config = model.config._attn_implementation
        made = graft(model)
        assert model.config._attn_implementation == config is not None
        assert torch.equal(made(given).logits, before)
        broken = copy.deepcopy(model)
        broken.config._attn_implementation = None
        assert not torch.equal(broken(given).logits, before)  # what the trap is about
