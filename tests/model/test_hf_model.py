"""`TwoAxisModel` and `TwoAxisForCausalLM`: what a forward pass takes and returns, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoModel, AutoModelForCausalLM

from tests.model.hf_helpers import BASE, MEMORIES, ONE_EACH, TOLERANCE, as_hf, logits, make, output, prompt, shared
from tests.support.numbers import far
from twoaxis.depth.stream import Seen, State
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.hf_model import TwoAxisForCausalLM, TwoAxisModel, TwoAxisOutput


@pytest.mark.parametrize("config", [*MEMORIES, ONE_EACH["tied"], ONE_EACH["blend"], ONE_EACH["placement"]])
def test_equals_the_decoder(config: ModelConfig) -> None:
    """The same numbers as the plain decoder class with the same weights."""
    model, tokens = make(config, torch.float32), prompt(0)
    names = {"model.embed_tokens.weight": "embed_tokens.weight"}
    weights = {names.get(k, k.removeprefix("model.trunk.")): v for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    plain = Decoder(config)
    plain.load_state_dict(weights, strict=True)
    assert far(logits(model, tokens), plain(tokens)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("count", [None, 7])
def test_loss_is_the_cross_entropy_of_the_next_token(count: int | None) -> None:
    model, tokens = make(BASE), prompt(1)
    labels = tokens.clone()
    labels[0, :5] = -100
    labels[1, 3] = -100
    given = {} if count is None else {"num_items_in_batch": torch.tensor(count)}  # what Trainer divides by
    found = output(model, tokens, labels=labels, **given)
    assert found.logits is not None
    chosen = found.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp_min(0).unsqueeze(-1)).squeeze(-1)
    counted = labels[:, 1:] != -100
    expected = -chosen[counted].sum() / (int(counted.sum()) if count is None else count)
    # transformers computes the loss in float32
    assert found.loss is not None
    assert abs(found.loss.item() - expected.item()) <= 1e-5 * expected.item()


def test_logits_to_keep() -> None:
    model, tokens = make(BASE), prompt(2)
    whole = logits(model, tokens)
    some = torch.tensor([0, 3, 11])
    for kept, expected in ((1, whole[:, -1:]), (5, whole[:, -5:]), (some, whole[:, some])):
        assert far(logits(model, tokens, logits_to_keep=kept), expected) <= 1e-14  # a matrix product of another shape


def test_embeddings_in_place_of_tokens() -> None:
    model, tokens = make(ONE_EACH["two axes"]), prompt(3)
    x = model.get_input_embeddings()(tokens)
    assert torch.equal(output(model, inputs_embeds=x).logits, logits(model, tokens))  # type: ignore[arg-type]
    for wrong in ({}, {"input_ids": tokens, "inputs_embeds": x}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**wrong)


@pytest.mark.parametrize("config", MEMORIES)
def test_padding_on_either_side_changes_no_real_token(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(4)
    for left, right in ((0, 5), (3, 0), (2, 4)):
        mask = torch.ones_like(tokens)
        mask[0, :left] = 0
        mask[0, 12 - right :] = 0
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        found = logits(model, tokens, attention_mask=mask, position_ids=positions)
        assert far(found[:1, left : 12 - right], logits(model, tokens[:1, left : 12 - right])) <= 1e-10
        assert far(found[1:], logits(model, tokens[1:])) <= 1e-10
        # without positions they run through the padding, and only the rounding of the angles differs
        running = logits(model, tokens, attention_mask=mask)
        assert far(running[:1, left : 12 - right], found[:1, left : 12 - right]) <= 1e-5


def test_masks_that_mean_nothing_are_refused() -> None:
    model, tokens = make(BASE), prompt(5)
    mask = torch.ones_like(tokens)
    mask[1, 4] = 0
    with pytest.raises(ValueError, match="attention_mask has a hole"):
        model(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match=r"must be \(batch, earlier \+ time\), got 4 dimensions"):
        model(tokens, attention_mask=torch.ones(2, 1, 12, 12))
    with pytest.raises(ValueError, match="covers 11 positions; 0 earlier ones and 12 new ones"):
        model(tokens, attention_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="does not return attention weights"):
        model(tokens, output_attentions=True)
    whole = logits(model, tokens)
    for kind in (torch.bool, torch.float32, torch.long):
        assert torch.equal(logits(model, tokens, attention_mask=torch.ones(2, 12, dtype=kind)), whole)


@pytest.mark.parametrize("config", MEMORIES)
def test_packed_documents_equal_separate_runs(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(6, batch=1)
    parts = tokens.split([4, 1, 5, 2], dim=1)
    apart = [logits(model, part, use_cache=False) for part in parts]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts]).unsqueeze(0)
    packed = logits(model, tokens, position_ids=positions, use_cache=False)
    assert far(packed, torch.cat(apart, dim=1)) <= 1e-10
    # documents that do not begin at zero are told apart as well
    moved = torch.cat([torch.arange(part.shape[1]) + 3 for part in parts]).unsqueeze(0)
    assert far(logits(model, tokens, position_ids=moved), torch.cat(apart, dim=1)) <= 1e-5
    # and the last document goes on in a later chunk
    cache = model.make_cache()
    logits(model, tokens[:, :7], position_ids=positions[:, :7], past_key_values=cache)
    rest = logits(model, tokens[:, 7:], position_ids=positions[:, 7:], past_key_values=cache)
    assert far(rest, packed[:, 7:]) <= 1e-10


@pytest.mark.parametrize("config", MEMORIES)
def test_eager_equals_sdpa(config: ModelConfig) -> None:
    tokens = prompt(7, length=40)
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    fused, spelled = make(config), make(config, attn_implementation="eager")
    assert (fused.config._attn_implementation, spelled.config._attn_implementation) == ("sdpa", "eager")
    for given in (None, mask):
        assert far(logits(spelled, tokens, attention_mask=given), logits(fused, tokens, attention_mask=given)) <= 1e-10
    spelled.set_attn_implementation("sdpa")
    assert torch.equal(logits(spelled, tokens), logits(fused, tokens))


@pytest.mark.parametrize("config", MEMORIES)
def test_hidden_states(config: ModelConfig) -> None:
    model, tokens = shared(config), prompt(8)
    found = output(model, tokens, output_hidden_states=True)
    assert found.hidden_states is not None
    assert [tuple(h.shape) for h in found.hidden_states] == [(2, 12, 16)] * (config.num_hidden_layers + 1)
    normalised: list[Any] = []
    hook = model.model.trunk.norm.register_forward_hook(lambda module, given, out: normalised.append(out))
    again = output(model.model, tokens).last_hidden_state
    hook.remove()
    assert again is not None
    assert again is normalised[0]
    assert found.logits is not None
    assert torch.equal(found.hidden_states[-1], again)
    assert torch.equal(model.lm_head(again), found.logits)
    if config.stream == "standard" and config.mixer is None:
        assert torch.equal(found.hidden_states[0], model.get_input_embeddings()(tokens))
    assert output(model, tokens).hidden_states is None


@pytest.mark.parametrize(
    "name", ["standard", "attention_residuals", "hyper_connections", "parallel", "blend", "placement"]
)
def test_depth_weights(name: str) -> None:
    """At every site what the stream itself says of the state it is in, one number per named source."""
    model, tokens = make(ONE_EACH[name]), prompt(9)
    found = output(model, tokens, output_depth_weights=True).depth_weights
    assert found is not None
    stream = model.model.trunk.stream
    expected: list[Tensor | None] = []

    def note(site: Any, state: State, seen: Seen) -> None:
        expected.append(stream.weights(state, site))

    x = model.get_input_embeddings()(tokens)
    info = model.model._token_info(x, None, None, None)
    with torch.no_grad():
        model.model.trunk.run(x, None, info, watch=note)
    names = model.model.depth_sources()
    assert len(found) == len(expected) == len(names) == len(stream.layout.sites)
    for a, b, sources in zip(found, expected, names, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)
            assert a.shape[-1] == len(sources)
            assert a.shape[:2] == (2, 12)
    assert output(model, tokens).depth_weights is None


def test_some_streams_have_depth_weights() -> None:
    found = output(make(ONE_EACH["attention_residuals"]), prompt(0), output_depth_weights=True).depth_weights
    assert found is not None
    assert all(weights is not None for weights in found)
    assert torch.allclose(found[-1].sum(-1), torch.ones(2, 12, 1, dtype=torch.float64))  # type: ignore[union-attr]


def test_tuples_and_the_base_model() -> None:
    model, tokens = make(BASE), prompt(10)
    as_tuple = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert [tuple(t.shape) for t in as_tuple] == [(), (2, 12, 61)]
    quiet = make(as_hf(BASE, return_dict=False))
    assert isinstance(quiet(tokens), tuple)
    assert isinstance(quiet(tokens, return_dict=True), TwoAxisOutput)
    base = AutoModel.from_config(as_hf(BASE))
    whole = AutoModelForCausalLM.from_config(as_hf(BASE))
    assert (type(base), type(whole)) == (TwoAxisModel, TwoAxisForCausalLM)
    assert model(tokens).past_key_values.get_seq_length() == 12
    assert model(tokens, use_cache=False).past_key_values is None
    assert make(as_hf(BASE, use_cache=False))(tokens).past_key_values is None


@pytest.mark.parametrize("config", MEMORIES)
def test_gradient_checkpointing(config: ModelConfig) -> None:
    tokens, found = prompt(11), []
    for every in (None, 1, 2):
        model = make(config).train()
        if every is not None:
            model.gradient_checkpointing_enable(every_n_layers=every)
            assert model.is_gradient_checkpointing
        result = model(tokens, labels=tokens, output_hidden_states=True)
        loss = result.loss + result.hidden_states[1].square().mean()
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        for name, gradient in gradients.items():
            expected = found[0][1][name]
            assert (gradient is None) == (expected is None), name
            if gradient is not None:
                assert (gradient - expected).abs().max() <= 1e-12 * (1 + expected.abs().max()), name


def test_checkpointing_recomputes_and_its_limits() -> None:
    model, tokens = make(BASE).train(), prompt(0)
    runs: list[int] = []
    for block in model.model.trunk.layers:
        block.register_forward_pre_hook(lambda block, given: runs.append(cast(int, block.number)))
    for every, again in ((1, [2, 1, 0]), (2, [2, 0])):
        runs.clear()
        model.gradient_checkpointing_enable(every_n_layers=every)
        found = model(tokens, labels=tokens, use_cache=True)
        assert found.past_key_values is None  # nothing is remembered while blocks are recomputed
        found.loss.backward()
        assert runs == [0, 1, 2, *again]
    model.gradient_checkpointing_disable()
    runs.clear()
    model(tokens, labels=tokens).loss.backward()
    assert runs == [0, 1, 2]
    with pytest.raises(ValueError, match="use_reentrant=True would lose the gradients"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="every_n_layers must be at least 1, got 0"):
        model.gradient_checkpointing_enable(every_n_layers=0)


def test_embeddings_can_be_resized() -> None:
    for tied in (True, False):
        model, tokens = make(dataclasses.replace(BASE, tie_word_embeddings=tied)), prompt(12)
        before = logits(model, tokens)
        model.resize_token_embeddings(70)
        assert model.config.vocab_size == 70
        after = logits(model, tokens)
        assert after.shape == (2, 12, 70)
        assert far(after[..., :61], before) <= 1e-14
        assert (model.get_input_embeddings().weight is model.lm_head.weight) == tied
        output(model, torch.full((1, 3), 69), labels=torch.full((1, 3), 69))
