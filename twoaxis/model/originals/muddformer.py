"""MUDDFormer as its released PyTorch models name it.

Module i stands after block i and mixes n = i + 2 slots: it is the read before block i + 1 here, the last one that of
the head. Linear weights are stored output first there and input first here. Two sizes are in the shapes alone:
`expand_last` and `round64`, which all released models have.
"""

from __future__ import annotations

from torch import Tensor

from twoaxis.depth.muddformer import MuddFormer
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.base import BLOCK, Adapted, Family, Found, Original, Row, Setting, Written

W1, W2, STATIC = "dynamic_dense.{i}.w1.weight", "dynamic_dense.{i}.w2.weight", "dense_bs.{i}"
NORMS = tuple((way, f"{{i}}.attention_norms.{number}") for number, way in enumerate("qkv"))
SIZES = ((True, True), (False, True), (False, False), (True, False))  # expand_last, round64; the released one first


class MuddFormerReleased(Family):
    """MUDDFormer and MUDDPythia, the PyTorch state dict."""

    name = "muddformer"
    title = "MUDDFormer, MUDDPythia (PyTorch)"
    stream = "muddformer"
    rows = (
        Row("", W1, "(K, D)", "generator_in.{i+1}", "transposed"),
        Row("", W2, "(C*n, K)", "generator_out.{i+1}", "transposed"),
        Row("", STATIC, "(C, n)", "static.{i+1}", "n = i + 2 slots; C = 4 ways, 1 after the last block"),
        *(
            Row(
                "layers.",
                f"{name}.weight",
                "(D,)",
                f"norms['{{i}}.{way}.weight']",
                "i ≥ 1; the trunk's, not the stream's",
            )
            for way, name in NORMS
        ),
        *(
            Row(
                "layers.",
                f"{name}.bias",
                "(D,)",
                f"norms['{{i}}.{way}.bias']",
                "i ≥ 1; only where they are layer norms",
            )
            for way, name in NORMS
        ),
    )
    settings = (
        Setting("norm_eps", "eps", 1e-6, "MUDDPythia has 1e-5"),
        Setting("use_parallel_residual", "kinds", False, "True: blocks of one parallel site, as in MUDDPythia"),
        Setting("expand_last", "expand_last", None, "told by the shapes, or without effect on them; checked"),
        Setting("round64", "round64", None, "told by the shapes; checked"),
    )
    namespace = r"(^|\.)(dynamic_dense|dense_bs|attention_norms)\."
    sign = r"(^|\.)(dynamic_dense|dense_bs)\."

    def read(self, found: Found, config: Original) -> Adapted:
        """Every module, and the norms of the ways if they are there."""
        blocks = found.count(W1, W2, STATIC)
        found.require((W1, W2, STATIC), range(blocks))
        width = found.size(W1, 0, dim=1)
        # with one block there is only the head's module, which always has one way
        ways = found.size(STATIC, 0) if blocks > 1 else 4
        if ways not in (1, 4):
            raise ValueError(f"{self.name}: {found.spell(STATIC, 0)} has {ways} ways; released models have 1 or 4")
        state = {}
        for i in range(blocks):
            n, c = i + 2, ways if i < blocks - 1 else 1
            hidden = found.size(W1, i)
            state[f"generator_in.{i + 1}"] = found.take(W1, i, shape=(hidden, width)).mT.contiguous()
            state[f"generator_out.{i + 1}"] = found.take(W2, i, shape=(c * n, hidden)).mT.contiguous()
            state[f"static.{i + 1}"] = found.take(STATIC, i, shape=(c, n))
        expand_last, round64 = self._sizes(found, config, ways, blocks)
        options = {
            "ways": "qkvr" if ways == 4 else "one",
            "expand_last": expand_last,
            "round64": round64,
            "eps": float(config["norm_eps"]),
        }
        kinds = ("parallel",) if config["use_parallel_residual"] else BLOCK
        norms = self._norms(found, blocks, width)
        return Adapted(self.stream, options, state, self.name, blocks, width, kinds, norms)

    def _sizes(self, found: Found, config: Original, ways: int, blocks: int) -> tuple[bool, bool]:
        """expand_last and round64 that give the hidden widths found."""
        have = [found.size(W1, i) for i in range(blocks)]
        fitting = [sizes for sizes in SIZES if have == [_hidden(i, ways, blocks, *sizes) for i in range(blocks)]]
        if not fitting:
            bases = [_hidden(i, ways, blocks, False, False) for i in range(blocks)]
            raise ValueError(
                f"{self.name}: hidden widths {have} of {found.spell(W1, 0)} and the following are neither {bases} "
                "nor that with the last one times four or all rounded up to multiples of 64"
            )
        told = (config.fields.get("expand_last"), config.fields.get("round64"))
        agreeing = [s for s in fitting if all(t is None or bool(t) == f for t, f in zip(told, s, strict=True))]
        if not agreeing:
            raise ValueError(
                f"{self.name}: the configuration has expand_last={told[0]}, round64={told[1]}, hidden widths are {have}"
            )
        return agreeing[0]

    def _norms(self, found: Found, blocks: int, width: int) -> dict[str, Tensor]:
        norms: dict[str, Tensor] = {}
        for leaf in ("weight", "bias"):
            names = [f"{name}.{leaf}" for _, name in NORMS]
            if any(found.has(name, i) for name in names for i in range(1, max(blocks, found.count()))):
                found.require(names, range(1, blocks))
                for i in range(1, blocks):
                    norms |= {f"{i}.{way}.{leaf}": found.take(f"{n}.{leaf}", i, shape=(width,)) for way, n in NORMS}
        return norms

    def write(self, made: Stream) -> Written:
        """The reverse; the norms are the trunk's."""
        assert isinstance(made, MuddFormer)
        kinds = self.refuse_kinds(made, BLOCK, ("parallel",))
        config = made.config
        self.refuse(made, dynamic=True, prenorm=False, postnorm=False, gelu="erf", first_norms="shared")
        self.refuse(made, generator_eps=(None, config.eps))
        tensors = {}
        for b in range(1, made.layout.blocks + 1):
            tensors[W1.format(i=b - 1)] = made.generator_in[str(b)].mT
            tensors[W2.format(i=b - 1)] = made.generator_out[str(b)].mT
            tensors[STATIC.format(i=b - 1)] = made.static[str(b)]
        settings = {
            "norm_eps": config.eps,
            "use_parallel_residual": kinds == ("parallel",),
            "expand_last": config.expand_last,
            "round64": config.round64,
        }
        return Written(tensors, settings)


def _hidden(i: int, ways: int, blocks: int, expand_last: bool, round64: bool) -> int:
    """K: hidden width of module i's generator."""
    last = i == blocks - 1
    hidden = (1 if last else ways) * (i + 2) * (4 if last and expand_last else 1)
    return (hidden // 64 + 1) * 64 if round64 else hidden
