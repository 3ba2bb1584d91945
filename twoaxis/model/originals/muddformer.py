"""MUDDFormer as its released PyTorch models name it.

Module i stands after block i and mixes i + 2 slots: it is the read before block i + 1 here, the last one that of the
head. Linear weights are stored output first there and input first here. Two sizes are in the shapes alone:
`expand_last` and `round64`, which all released models have.
"""

from __future__ import annotations

from typing import Any

from twoaxis.depth.stream import Stream
from twoaxis.model.originals.family import BLOCK, Family, Kinds, Reading
from twoaxis.model.originals.table import TRANSPOSED, Row, Setting

SIZES = ((True, True), (False, True), (False, False), (True, False))  # expand_last, round64; the released one first


def _norms(leaf: str, note: str) -> tuple[Row, ...]:
    return tuple(
        Row(
            f"layers.{{i}}.attention_norms.{number}.{leaf}",
            f"norms.{{i}}.{way}.{leaf}",
            "(D,)",
            f"i ≥ 1; {note}",
            form=leaf,
            where="i >= 1",
        )
        for number, way in enumerate("qkv")
    )


class MuddFormerReleased(Family):
    """MUDDFormer and MUDDPythia, the PyTorch state dict."""

    name = "muddformer"
    stream = "muddformer"
    layers = "layers."
    rows = (
        Row("dynamic_dense.{i}.w1.weight", "generator_in.{i + 1}", "(K, D)", "transposed", view=TRANSPOSED),
        Row("dense_bs.{i}", "static.{i + 1}", "(C, i + 2)", "C = 4 ways, 1 after the last block"),
        Row("dynamic_dense.{i}.w2.weight", "generator_out.{i + 1}", "(C*(i + 2), K)", "transposed", view=TRANSPOSED),
        *_norms("weight", "the model's, not the stream's"),
        *_norms("bias", "only where they are layer norms"),
    )
    settings = (
        Setting("norm_eps", "eps", 1e-6, "MUDDPythia has 1e-5"),
        Setting(
            "use_parallel_residual", "kinds", False, "True: blocks of one parallel site, as in MUDDPythia", 1, False
        ),
        Setting("expand_last", "expand_last", None, "told by the shapes, or without effect on them; checked"),
        Setting("round64", "round64", None, "told by the shapes; checked"),
    )
    each = "CK"
    namespace = r"(^|\.)(dynamic_dense|dense_bs|attention_norms)\."
    kinds = (BLOCK, ("parallel",))
    beyond = ("generator_scale",)

    def options(self, reading: Reading) -> dict[str, Any]:
        """The ways, and the expand_last and round64 that give the hidden widths found."""
        blocks = reading.letters["L"]
        have = [reading.each[i]["K"] for i in range(blocks)]
        found = [reading.each[i]["C"] for i in range(blocks)]
        ways = found[0] if blocks > 1 else 4  # one block has only the head's module, which always has one way
        if ways not in (1, 4) or found != [ways] * (blocks - 1) + [1]:
            raise ValueError(
                f"{self.name}: {reading.keys.spell(self.rows[1], 0)} and the following have {found} ways; released "
                "models have 1 or 4, and one after the last block"
            )
        fitting = [sizes for sizes in SIZES if have == _hidden(ways, blocks, *sizes)]
        if not fitting:
            raise ValueError(
                f"{self.name}: hidden widths {have} of {reading.keys.spell(self.rows[0], 0)} and the following are "
                f"neither {_hidden(ways, blocks, False, False)} nor that with the last one times four or all rounded "
                "up to multiples of 64"
            )
        told = (reading.fields.get("expand_last"), reading.fields.get("round64"))
        agreeing = [s for s in fitting if all(t is None or bool(t) == f for t, f in zip(told, s, strict=True))]
        if not agreeing:
            raise ValueError(
                f"{self.name}: the configuration has expand_last={told[0]}, round64={told[1]}, hidden widths are {have}"
            )
        expand_last, round64 = agreeing[0]
        return {"ways": "qkvr" if ways == 4 else "one", "expand_last": expand_last, "round64": round64}

    def layout(self, reading: Reading) -> tuple[int, Kinds]:
        """Blocks of two sites, or of one parallel one."""
        return reading.letters["L"], ("parallel",) if reading.setting("use_parallel_residual") else BLOCK

    def translate(self, made: Stream) -> dict[str, Any]:
        """Whether sites are parallel."""
        return {"use_parallel_residual": made.sites[0].kind == "parallel"}


def _hidden(ways: int, blocks: int, expand_last: bool, round64: bool) -> list[int]:
    """K: hidden width of every module's generator."""
    widths = [ways * (i + 2) for i in range(blocks - 1)] + [(blocks + 1) * (4 if expand_last else 1)]
    return [(width // 64 + 1) * 64 for width in widths] if round64 else widths
