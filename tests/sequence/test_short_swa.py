from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sequence.helpers import small_decoder
from tests.support.numbers import close, randn
from twoaxis import Seen, ShortSWA


def test_residual_form_is_the_papers_block() -> None:
    model = small_decoder(mixer="short_swa", mixer_options={"window": 3, "heads": 2}, num_hidden_layers=1)
    assert [site.kind for site in model.stream.sites] == ["mixer", "attention", "mlp"]
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    h = model.embed(ids)
    p = dict(model.named_parameters())
    mixer: Any = model.layers[0].get_submodule("mixer")
    local = mixer.local

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    s = h + local.definition(norm(h, p["layers.0.mixer.norm.weight"]))
    attention: Any = model.layers[0].self_attn
    mlp: Any = model.layers[0].mlp
    info = model.info(ids)
    a = s + attention(Seen(norm(s, p["layers.0.input_layernorm.weight"])), info)
    out = a + mlp(Seen(norm(a, p["layers.0.post_attention_layernorm.weight"])), info)
    close(model(ids), norm(out, p["norm.weight"]) @ p["embed_tokens.weight"].T)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}, {"rope": False, "head_width": 64}, {"window": 64}], ids=str)
def test_the_default_start_attends_to_the_current_token(options: dict[str, Any]) -> None:
    local = ShortSWA(256, heads=8, **options)
    assert not local.output.weight.any()
    assert abs(local.value.weight.std() - 0.02) < 0.002
    shown = local.quantities(randn(2, 200, 256, dtype=torch.float32), local.start())["attention"].value[:, 100:]
    assert 0.75 < shown[..., 0].mean() < 0.96, "e³ / (1 + e³) is 0.95, and the others' logits differ from zero"
    spread = math.sqrt((math.log(local.window) + 3) / (256 * math.sqrt(local.head_width)))
    assert abs(local.key.weight.std() / spread - 1) < 0.05
    queries = local.query.weight.view(8, -1, 256)
    assert (queries[0] - queries[1]).std() > 0.02, "heads differ, also where they share a key head"


def test_the_literal_starts() -> None:
    for start in ("zero", "normal"):
        local = ShortSWA(64, window=4, heads=2, sink=True, qk_norm=True, start=start)
        for linear in (local.query, local.key, local.value):
            assert abs(linear.weight.std() - 0.02) < 0.002
        assert abs(local.output.weight.std() - (0.0 if start == "zero" else 0.02)) < 0.002
        for parameter, value in ((local.sink, 0.0), (local.query_norm, 1.0), (local.key_norm, 1.0)):
            assert parameter is not None
            assert torch.equal(parameter, torch.full_like(parameter, value))
