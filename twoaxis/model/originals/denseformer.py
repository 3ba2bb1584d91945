"""DenseFormer as its package names it, and as the model of its experiments does.

The two give period and dilation different meanings: in the experiments only every period-th block output is kept, and
the dilation counts those. experiments(dilation k, period p) is package(dilation k·p, period p), which is ours.

Neither spells them out in its tensors, but the number of weights after block j is floor(j / dilation) + 1, which mostly
tells the dilation; where it does not, and the answers differ, the configuration is asked for.
"""

from __future__ import annotations

import re

from torch import Tensor

from twoaxis.depth.denseformer import DenseFormer
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.base import REQUIRED, Adapted, Family, Found, Original, Row, Setting, Written


def find_dilation(weights: dict[int, int], given: int | None, where: str) -> int:
    """The dilation at which the average after unit j has weights[j] weights.

    Args:
        weights: how many each has.
        given: what the configuration says, if anything.
        where: what to call it in messages.
    """
    last = max(weights)
    fitting = [k for k in range(1, last + 2) if all(n == j // k + 1 for j, n in weights.items())]
    if given is not None:
        if not all(n == j // given + 1 for j, n in weights.items()):
            raise ValueError(f"{where}={given} does not give the numbers of weights {list(weights.values())}")
        return given
    if not fitting:
        raise ValueError(f"no {where} gives the numbers of weights {list(weights.values())}")
    reads = {tuple(j % k for j in weights) for k in fitting}
    if len(reads) > 1:
        raise ValueError(
            f"the numbers of weights {list(weights.values())} go with several values of {where}, {fitting}: "
            f"give config={{{where.split('.')[-1]!r}: ...}}"
        )
    return fitting[0]


class DenseFormerPackage(Family):
    """The package `denseformer`: its DWAModules, anywhere in a model."""

    name = "denseformer"
    title = "DenseFormer, the package"
    stream = "denseformer"
    rows = (
        Row("", "alphas.{i}.weight", "(1, (i + 1)//dilation + 1)", "alpha.{i+1}", "absent unless period divides i + 1"),
    )
    settings = (
        Setting(
            "n_blocks", "blocks", None, "needed where the period is above 1: nothing tells of blocks after the last"
        ),
        Setting("dilation", "dilation", None, "told by the shapes, mostly; checked"),
        Setting("period", "period", None, "told by the numbers; checked"),
    )
    namespace = r"(^|\.)alphas\.\d+\."
    sign = namespace

    def read(self, found: Found, config: Original) -> Adapted:
        """Each average's weights as a vector; period and dilation from what is there."""
        after = sorted(i + 1 for _, i in found.keys if i is not None)
        period = config["period"] or after[0]
        blocks = config["n_blocks"] or (after[-1] if period == 1 else None)
        if blocks is None:
            raise ValueError(
                f"{self.name}: averages after blocks {after} have period {period}; how many blocks follow the last is "
                "not in the tensors: give config={'n_blocks': ...}"
            )
        wanted = list(range(period, blocks + 1, period))
        found.require([self.rows[0].name], [j - 1 for j in wanted])
        if after != wanted:
            extra = [found.spell(self.rows[0].name, j - 1) for j in after if j not in wanted]
            raise ValueError(f"{self.name}: {blocks} blocks with period {period} have no {', '.join(extra)}")
        counts = {j: found.size(self.rows[0].name, j - 1, dim=1) for j in after}
        dilation = find_dilation(counts, config["dilation"], f"{self.name}.dilation")
        state = {f"alpha.{j}": found.take(self.rows[0].name, j - 1, shape=(1, n))[0] for j, n in counts.items()}
        options = {"dilation": dilation, "period": period}
        return Adapted(self.stream, options, state, self.name, blocks, None)

    def write(self, made: Stream) -> Written:
        """The reverse."""
        self.refuse(made)
        assert isinstance(made, DenseFormer)
        tensors: dict[str, Tensor] = {f"alphas.{int(j) - 1}.weight": alpha[None] for j, alpha in made.alpha.items()}
        config = made.config
        settings = {"n_blocks": made.layout.blocks, "dilation": config.dilation, "period": config.period}
        return Written(tensors, settings)


class DenseFormerExperiments(Family):
    """The training model in the original's experiments."""

    name = "denseformer_experiments"
    title = "DenseFormer, the model of its experiments"
    stream = "denseformer"
    rows = (
        Row(
            "",
            "weights.{i}.weight",
            "(1, (i + 1)//dilation_factor + 1)",
            "alpha.{(i+1)*increase_T_every}",
            "one per group of increase_T_every blocks",
        ),
    )
    settings = (
        Setting(
            "increase_T_every",
            "period",
            REQUIRED,
            "blocks per group; told by the names transformer.h.{group}.{block}. where they are there, then checked",
        ),
        Setting("dilation_factor", "dilation", None, "times increase_T_every; told by the shapes, mostly; checked"),
    )
    namespace = r"(^|\.)weights\.\d+\.weight$"
    sign = namespace

    def read(self, found: Found, config: Original) -> Adapted:
        """As the package's, with dilation counted in blocks."""
        groups = found.count()
        found.require([self.rows[0].name], range(groups))
        period = self._period(found, config, groups)
        counts = {r + 1: found.size(self.rows[0].name, r, dim=1) for r in range(groups)}
        dilation = find_dilation(counts, config["dilation_factor"], f"{self.name}.dilation_factor")
        state = {
            f"alpha.{r * period}": found.take(self.rows[0].name, r - 1, shape=(1, n))[0] for r, n in counts.items()
        }
        options = {"dilation": dilation * period, "period": period}
        return Adapted(self.stream, options, state, self.name, groups * period, None)

    def _period(self, found: Found, config: Original, groups: int) -> int:
        pairs = {(int(m[2]), int(m[3])) for key in found.all_keys if (m := re.search(r"(^|\.)h\.(\d+)\.(\d+)\.", key))}
        if not pairs:
            return config["increase_T_every"]
        period, grouped = max(b for _, b in pairs) + 1, max(g for g, _ in pairs) + 1
        found.require([self.rows[0].name], range(grouped))
        if groups > grouped or len(pairs) != grouped * period:
            raise ValueError(
                f"{self.name}: {len(pairs)} blocks in {grouped} groups of up to {period} do not go with "
                f"{found.spell(self.rows[0].name, groups - 1)} as the last of the averages, one per group"
            )
        config.agree("increase_T_every", period)
        return period

    def write(self, made: Stream) -> Written:
        """The reverse, where groups come out even."""
        self.refuse(made)
        assert isinstance(made, DenseFormer)
        period, dilation, blocks = made.config.period, made.config.dilation, made.layout.blocks
        if blocks % period or dilation % period:
            raise ValueError(
                f"{self.name} needs a period that divides the blocks and the dilation, got period={period}, "
                f"blocks={blocks}, dilation={dilation}"
            )
        tensors = {f"weights.{int(j) // period - 1}.weight": alpha[None] for j, alpha in made.alpha.items()}
        return Written(tensors, {"increase_T_every": period, "dilation_factor": dilation // period})
