"""The same GPT with another residual stream: five lines differ from tiny_gpt.py.

python examples/tiny_gpt_with_a_stream.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twoaxis


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int = 256, width: int = 64, blocks: int = 4, heads: int = 4, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norm_1 = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.norm_2 = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(blocks))
        self.mlp = nn.ModuleList(MLP(width) for _ in range(blocks))
        self.stream = twoaxis.stream("attention_residuals", blocks=blocks, width=width, block_size=4)
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        blocks = zip(self.norm_1, self.attention, self.norm_2, self.mlp, strict=True)
        layers = [layer for n1, a, n2, m in blocks for layer in (("attention", n1, a), ("mlp", n2, m))]
        x = twoaxis.compose(self.stream, layers)(x)
        return self.head(self.final_norm(x))


def train(model: nn.Module, steps: int = 30) -> float:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    loss = torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        start = torch.randint(len(text) - 65, (8,))
        batch = torch.stack([text[s : s + 65] for s in start])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"loss after 30 steps: {train(GPT()):.3f}")
