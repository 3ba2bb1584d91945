"""What is kept between tokens and alive in a pass, against caches and states that exist."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.costs.helpers import FIRST, FIRST_MIXERS, SHAPE, WIDE_DELTA, Fields, label
from twoaxis.costs.trace import meta_model, runner_of, trace_decoding, trace_step
from twoaxis.depth.counts import count
from twoaxis.depth.walk import apply_nothing
from twoaxis.model.decoder import Decoder
from twoaxis.model.stages import boundaries


@torch.no_grad()
@pytest.mark.parametrize("fields", [*FIRST_MIXERS, *FIRST, WIDE_DELTA, {"attention_windows": (5, None, 5)}], ids=label)
def test_bytes_kept_are_those_of_the_real_past(fields: Fields) -> None:
    batch, context = 2, 23
    model = Decoder(dataclasses.replace(SHAPE, **fields))
    past = model.start()
    for chunk in torch.zeros(batch, context, dtype=torch.long).split(5, dim=1):
        _, past = model.step(chunk, past)
    blank = meta_model(model.config, "float32")
    kept = trace_decoding(blank, batch, context).kept
    own = {part: [r for name, r in past.rings.items() if name.startswith("stream.") == part] for part in (True, False)}
    assert kept.attention == sum(ring.nbytes() for ring in own[False] if ring.window is None)
    assert kept.local == sum(ring.nbytes() for ring in own[False] if ring.window is not None)
    assert kept.stream == sum(ring.nbytes() for ring in own[True])
    assert kept.stream == batch * 4 * count(model.stream).kept
    assert kept.total == past.nbytes()


@pytest.mark.parametrize("fields", [WIDE_DELTA, {"attention_windows": (5, None, 5)}], ids=str)
def test_a_lengthened_past_is_that_of_a_long_one(fields: Fields) -> None:
    blank = meta_model(dataclasses.replace(SHAPE, **fields), "float32")
    ours, real = runner_of(blank).lengthened(trace_step(blank, 1, 9).past, 50), trace_step(blank, 1, 50).past
    seen = [{name: (ring.seen, ring.stored) for name, ring in past.rings.items()} for past in (ours, real)]
    assert seen[0] == seen[1]
    assert ours.seen == real.seen == 50


@torch.no_grad()
@pytest.mark.parametrize("fields", FIRST, ids=label)
def test_boundaries_are_those_of_a_real_state(fields: Fields) -> None:
    config = dataclasses.replace(SHAPE, num_hidden_layers=4, **fields)
    model = Decoder(config)
    stream, x = model.stream, torch.randn(2, 6, 16)
    state, real = stream.open(x), []
    for site in stream.layout.sites:
        if site.first:
            real.append([tuple(t.shape[2:]) for t in stream.pack(state)])
        if site.index < len(stream.sites):
            seen = stream.read(state, site)
            c, y = apply_nothing(stream, seen, torch.randn(2, 6, 16), (config.kv_heads, config.head_size))
            state = stream.write(state, site, y, seen, c)
    ours = [[tuple(t.shape[2:]) for t in packed] for packed in boundaries(meta_model(config, "float32"))]
    assert ours == real
