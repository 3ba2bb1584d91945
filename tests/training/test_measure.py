"""Peaks computed by hand and by torch's own profiler; speed by its bounds; the model is left as it was."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from twoaxis.base import timer
from twoaxis.base.meter import Meter
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import next_token_loss
from twoaxis.training.measure import Memory, adamw, peak_memory, throughputs

N = 1000
SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


class Vector(nn.Module):
    """N numbers; its steps are written as losses."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ModelConfig()
        self.weight = nn.Parameter(torch.linspace(-1, 1, N))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def chain(model: nn.Module, tokens: Tensor) -> Tensor:
    return cast(Vector, model).weight.exp().sin().sum()


def test_what_is_freed_does_not_count() -> None:
    with Meter() as live:
        torch.ones(N).mul(2)
        assert (live.now, live.peak) == (0, 8 * N)
        live.reset()
        assert live.peak == 0


def test_backward_by_hand() -> None:
    """The most is alive while sin goes back: the weight, exp's result, its cosine and the product."""
    found = peak_memory(Vector(), 1, 1, loss=chain, optimizer=sgd)
    scalars = 4 + 4  # the loss and the one it goes back with
    assert found == Memory(parameters=4 * N, gradients=4 * N, optimizer=0, activations=4 * N + 4, peak=16 * N + scalars)
    more = peak_memory(Vector(), 1, 1, loss=chain, optimizer=lambda m: torch.optim.SGD(m.parameters(), momentum=0.9))
    assert (more.optimizer, more.peak) == (4 * N, found.peak + 4 * N)
    assert peak_memory(Vector(), 1, 1, loss=chain).optimizer == 8 * N + 4  # AdamW: two moments and a step


def profiled_peak(model: nn.Module, tokens: Tensor) -> int:
    """The most that torch's allocator gave out in the second step, what was there before it not counted."""
    optimizer = adamw(model)

    def step() -> None:
        next_token_loss(model, tokens).backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    optimizer.zero_grad(set_to_none=True)
    results: Any = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("stream", ["standard", "attention_residuals"])
def test_torch_profiler_sees_the_same(stream: str) -> None:
    """But for what operations need inside themselves: none of a hundredth here."""
    model = Decoder(ModelConfig(**SHAPE, stream=stream))
    found = peak_memory(model, 4, 48)
    tokens = torch.randint(0, 61, (4, 49), generator=torch.Generator().manual_seed(0))
    assert found.peak - found.parameters - found.optimizer == pytest.approx(profiled_peak(model, tokens), rel=0.01)
    assert found == peak_memory(model, 4, 48)


def test_parts_of_a_decoder() -> None:
    tied, untied = (peak_memory(Decoder(ModelConfig(**SHAPE, tie_word_embeddings=t)), 2, 16) for t in (True, False))
    model = Decoder(ModelConfig(**SHAPE))
    sizes = [p.numel() for p in model.parameters()]
    assert tied.parameters == tied.gradients == 4 * sum(sizes)
    assert tied.optimizer == 8 * sum(sizes) + 4 * len(sizes)
    assert untied.parameters - tied.parameters == untied.gradients - tied.gradients == 4 * 61 * 32
    assert tied.peak > tied.parameters + tied.optimizer + tied.activations
    wider, parted = peak_memory(model, 4, 16), peak_memory(model, 4, 16, accumulate=2)
    assert [each.activations / tied.activations for each in (wider, parted)] == pytest.approx([2, 1], rel=0.01)
    assert parted.gradients == tied.gradients
    # in the second pass the gradients of the first are there, and of each parameter one more for the moment
    assert tied.peak < parted.peak < tied.peak + 2 * tied.gradients
    for parameter in list(model.parameters())[2:]:
        parameter.requires_grad_(False)
    frozen = peak_memory(model, 2, 16)
    assert (frozen.parameters, frozen.gradients) == (tied.parameters, 4 * sum(sizes[:2]))


def test_model_is_left_as_it_was() -> None:
    model = Decoder(ModelConfig(**SHAPE, stream="deep_delta")).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradient = torch.ones_like(model.embed_tokens.weight)
    model.embed_tokens.weight.grad = gradient
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def noisy(model: nn.Module, tokens: Tensor) -> Tensor:
        assert model.training
        return next_token_loss(model, tokens) * torch.rand(())

    def wild(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=float("inf"))

    peak_memory(model, 2, 8, loss=noisy, optimizer=wild)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.embed_tokens.weight.grad is gradient
    assert all(p.grad is None for p in model.parameters() if p is not model.embed_tokens.weight)
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the timer reads; it moves on where a test says so."""
    now = [0.0]
    for name in ("process_time", "perf_counter"):
        monkeypatch.setattr(timer.time, name, lambda: now[0])
    return now


def test_part_of_a_step_that_tokens_do_not_take(clock: list[float]) -> None:
    """A pause in every call is fixed, one for every token is not."""
    model = Decoder(ModelConfig(**SHAPE))

    def pausing(each: float, token: float) -> float | None:
        def loss(model: nn.Module, tokens: Tensor) -> Tensor:
            clock[0] += each + token * (tokens.numel() - len(tokens))
            return next_token_loss(model, tokens)

        return throughputs({"it": lambda: model}, 4, 16, rounds=2, steps=1, loss=loss, fixed=True)["it"].fixed

    assert pausing(0.25, 0.0) == 1.0
    assert pausing(0.0, 0.25) == 2 / 64


def test_models_take_turns(clock: list[float]) -> None:
    """Each makes its steps of a round; each round begins with another one."""
    order: list[str] = []
    pauses = {"fast": 0.25, "slow": 2.0, "third": 0.5}
    models = {name: Decoder(ModelConfig(**SHAPE)) for name in pauses}
    made = {id(model): name for name, model in models.items()}

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        order.append(made[id(model)])
        clock[0] += pauses[order[-1]]
        return next_token_loss(model, tokens)

    builders = {name: lambda model=model: model for name, model in models.items()}
    found = throughputs(builders, 2, 8, accumulate=2, rounds=3, steps=2, loss=loss)
    names = tuple(models)
    assert order == [n for start in (0, 0, 1, 2) for n in (*names[start:], *names[:start]) for _ in range(4)]
    # two steps of 16 tokens, of two passes each, in a round
    rates = {name: (2 * 2 * 8 / (4 * pause),) * 3 for name, pause in pauses.items()}
    assert {name: speed.rate.values for name, speed in found.items()} == rates


def test_mistakes() -> None:
    model = Decoder(ModelConfig(**SHAPE))
    with torch.device("meta"):
        unreal = Decoder(ModelConfig(**SHAPE))
    both: Any = {"a": lambda: model}
    for call, message in (
        (lambda: peak_memory(model, 3, 8, accumulate=2), r"accumulate \(2\) must divide batch \(3\)"),
        (lambda: throughputs(both, 2, 0), "context must be at least 1, got 0"),
        (lambda: peak_memory(nn.Linear(2, 2), 1, 1), "Linear has no config with a vocabulary"),
        (lambda: peak_memory(cast(Any, torch.compile(model)), 1, 8), r"before torch\.compile"),
        (lambda: throughputs({"a": lambda: unreal}, 1, 8), "on one real device; they are on meta"),
        (lambda: throughputs({}, 1, 8), "no models"),
        (lambda: throughputs(both, 1, 8, rounds=0), "got rounds=0 and steps=2"),
        (lambda: throughputs(both, 1, 8, steps=0), "got rounds=7 and steps=0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
