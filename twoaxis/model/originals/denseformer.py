"""DenseFormer as its package names it, and as the model of its experiments does.

The two give period and dilation different meanings: in the experiments only every period-th block output is kept, and
the dilation counts those. experiments(dilation k, period p) is package(dilation k·p, period p), which is ours.

Neither spells them out in its tensors, but the number of weights after block j is floor(j / dilation) + 1, which mostly
tells the dilation; where it does not, and the answers differ, the configuration is asked for.
"""

from __future__ import annotations

import re
from typing import Any

from twoaxis.depth.denseformer import DenseFormer
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.family import BLOCK, Family, Kinds, Reading
from twoaxis.model.originals.table import REQUIRED, Row, Setting

GROUPS = "blocks per group; told by the names transformer.h.{group}.{block}. where they are there, then checked"


def find_dilation(weights: dict[int, int], given: int | None, where: str) -> int:
    """The dilation at which the average after unit j has weights[j] weights.

    Args:
        weights: how many each has.
        given: what the configuration says, if anything.
        where: what to call it in messages.
    """
    last = max(weights, default=0)
    fitting = [k for k in range(1, last + 2) if all(n == j // k + 1 for j, n in weights.items())]
    if given is not None:
        if not all(n == j // given + 1 for j, n in weights.items()):
            raise ValueError(f"{where}={given} does not give the numbers of weights {list(weights.values())}")
        return given
    if not fitting:
        raise ValueError(f"no {where} gives the numbers of weights {list(weights.values())}")
    if len({tuple(j % k for j in weights) for k in fitting}) > 1:
        raise ValueError(
            f"the numbers of weights {list(weights.values())} go with several values of {where}, {fitting}: "
            f"give config={{{where.split('.')[-1]!r}: ...}}"
        )
    return fitting[0]


class DenseFormerPackage(Family):
    """The package `denseformer`: its DWAModules, anywhere in a model."""

    name = "denseformer"
    stream = "denseformer"
    rows = (
        Row(
            "alphas.{i}.weight",
            "alpha.{i + 1}",
            "(1, (i + 1)//dilation + 1)",
            "absent unless period divides i + 1",
            where="(i + 1) % period == 0",
        ),
    )
    settings = (
        Setting(
            "n_blocks", "blocks", None, "needed if the period is above 1: blocks may follow the last", copied=False
        ),
        Setting("dilation", "dilation", None, "told by the shapes, mostly; checked"),
        Setting("period", "period", None, "told by the numbers; checked"),
    )
    sizes = (("dilation", "dilation"), ("period", "period"))
    namespace = r"(^|\.)alphas\.\d+\."
    kinds = ()

    def find(self, reading: Reading) -> dict[str, int]:
        """Period and number of blocks from the numbers that are there, dilation from the numbers of weights."""
        counts = _counts(reading)
        after = sorted(counts)
        period = reading.setting("period") or after[0]
        blocks = reading.setting("n_blocks") or (after[-1] if period == 1 else None)
        if blocks is None:
            raise ValueError(
                f"{self.name}: averages after blocks {after} have period {period}; how many blocks follow the last is "
                "not in the tensors: give config={'n_blocks': ...}"
            )
        wanted = {j: n for j, n in counts.items() if j % period == 0}
        dilation = find_dilation(wanted, reading.setting("dilation"), f"{self.name}.dilation")
        return {"L": blocks, "period": period, "dilation": dilation}

    def translate(self, made: Stream) -> dict[str, Any]:
        """The number of blocks."""
        return {"n_blocks": made.layout.blocks}


class DenseFormerExperiments(Family):
    """The training model in the original's experiments."""

    name = "denseformer_experiments"
    stream = "denseformer"
    rows = (
        Row(
            "weights.{i}.weight",
            "alpha.{(i + 1)*increase_T_every}",
            "(1, (i + 1)//dilation_factor + 1)",
            "one per group of increase_T_every blocks",
        ),
    )
    settings = (
        Setting("increase_T_every", "period", REQUIRED, GROUPS, copied=False),
        Setting(
            "dilation_factor", "dilation", None, "times increase_T_every; told by the shapes, mostly", copied=False
        ),
    )
    namespace = r"(^|\.)weights\.\d+\.weight$"
    kinds = ()

    def find(self, reading: Reading) -> dict[str, int]:
        """Blocks per group from the names of the blocks, dilation from the numbers of weights."""
        blocks = [re.search(r"(^|\.)h\.(\d+)\.(\d+)\.", key) for key in reading.keys.all]
        pairs = {(int(found[2]), int(found[3])) for found in blocks if found}
        if pairs:
            groups, period = (max(numbers) + 1 for numbers in zip(*pairs, strict=True))
            last = reading.keys.spell(self.rows[0], reading.keys.count - 1)
            if reading.keys.count > groups or len(pairs) != groups * period:
                raise ValueError(
                    f"{self.name}: {len(pairs)} blocks in {groups} groups of up to {period} do not go with {last} as "
                    "the last of the averages, one per group"
                )
            reading.agree("increase_T_every", period)
        else:
            groups, period = reading.keys.count, reading.setting("increase_T_every")
        dilation = find_dilation(_counts(reading), reading.setting("dilation_factor"), f"{self.name}.dilation_factor")
        return {"L": groups, "increase_T_every": period, "dilation_factor": dilation}

    def options(self, reading: Reading) -> dict[str, Any]:
        """Dilation counted in blocks."""
        period = reading.letters["increase_T_every"]
        return {"dilation": reading.letters["dilation_factor"] * period, "period": period}

    def layout(self, reading: Reading) -> tuple[int, Kinds]:
        """All blocks of all groups."""
        return reading.letters["L"] * reading.letters["increase_T_every"], BLOCK

    def letters(self, made: Stream) -> dict[str, int]:
        """Counted in groups, where they come out even."""
        assert isinstance(made, DenseFormer)
        period, dilation, blocks = made.config.period, made.config.dilation, made.layout.blocks
        if blocks % period or dilation % period:
            raise ValueError(
                f"{self.name} needs a period that divides the blocks and the dilation, got period={period}, "
                f"blocks={blocks}, dilation={dilation}"
            )
        return {"L": blocks // period, "increase_T_every": period, "dilation_factor": dilation // period}

    def translate(self, made: Stream) -> dict[str, Any]:
        """Counted in groups."""
        letters = self.letters(made)
        return {name: letters[name] for name in ("increase_T_every", "dilation_factor")}


def _counts(reading: Reading) -> dict[int, int]:
    """How many weights the average after each unit has."""
    tensors = reading.keys.of(reading.family.rows[0])
    return {i + 1: t.shape[-1:].numel() for i, t in sorted(tensors.items(), key=lambda at: at[0] or 0) if i is not None}
