"""What a user asks of a comparison: options, a file or Python; what is not said is None.

A first request becomes a plan with every default filled in. A later one for the same folder is added to the plan that
stands there: it may name more contenders, data, sizes, seeds or learning rates, and must not contradict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twoaxis.comparison.controls import pin
from twoaxis.comparison.plan import FROM_SCRATCH, LR_SEED, OWN, Match, Plan, check_contenders, differing, merge
from twoaxis.comparison.sizes import Size, parse_sizes
from twoaxis.model.variant import Contender, make_contender
from twoaxis.training.config import RUNNING, TrainConfig

WHERE = {
    "stream": "contenders (--stream)",
    "mixer": "contenders (--mixer)",
    "data": "the data sets (--data)",
    "seed": "the seeds (--seeds)",
    "lr": "the learning rates (--lr)",
}
"""What takes the place of a run's own fields."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A comparison as far as it is told."""

    base: dict[str, Any] = field(default_factory=dict)
    """Fields of `TrainConfig` that all runs share."""
    contenders: tuple[Contender, ...] = ()
    """The plain residual is added where no other baseline is named."""
    baseline: str | None = None
    """Label of the contender the others are compared with; None is the plain residual."""
    controls: bool = False
    """Add the controls that belong to the contenders; see `twoaxis.comparison.controls`."""
    data: tuple[tuple[str, ...], ...] = ()
    """Data sets, each the sources of one."""
    sizes: str | None = None
    """As in `twoaxis.comparison.sizes`."""
    seeds: tuple[int, ...] | None = None
    """None is 0, 1, 2."""
    match: Match | None = None
    """None is tokens."""
    flops: float | None = None
    """Budget of a run for match="flops"; None is what the baseline takes."""
    lrs: tuple[float, ...] = ()
    """Learning rates to choose from."""
    lr_seeds: tuple[int, ...] | None = None
    """None is 1000, 1001."""
    use: tuple[str, ...] = ()
    """Python files that register streams and mixers of one's own."""

    def __post_init__(self) -> None:
        for name in (*OWN, *FROM_SCRATCH):
            if name in self.base:
                instead = WHERE.get(name, "models trained from scratch: a comparison does not go on from saved ones")
                raise ValueError(f"a comparison has no field {name!r} of its own; it has {instead}")
        check_contenders(self.contenders)

    def fresh(self) -> Plan:
        """The plan of a new comparison."""
        base = TrainConfig.from_dict(self.base)
        contenders = self.contenders
        plain = make_contender()
        same = [contender.label for contender in contenders if contender.key == plain.key]
        baseline = self.baseline or (same[0] if same else plain.label)
        if not same and baseline == plain.label:
            contenders = (plain, *contenders)
        plan = Plan(
            base=base,
            contenders=pin(contenders),
            baseline=baseline,
            data=self.data or (TrainConfig().data,),
            sizes=(Size(label=base.preset, preset=base.preset),)
            if self.sizes is None
            else parse_sizes(self.sizes, base.preset),
            seeds=(0, 1, 2) if self.seeds is None else self.seeds,
            match=self.match or "tokens",
            flops=self.flops,
            lrs=self.lrs or (TrainConfig().lr,),
            lr_seeds=(LR_SEED, LR_SEED + 1) if self.lr_seeds is None else self.lr_seeds,
            use=self.use,
        )
        _check_budget(plan)
        if len(contenders) < 2 and self.sizes is None:
            raise ValueError("there is only the baseline to run; name contenders with --stream or --mixer")
        return plan

    def grow(self, plan: Plan) -> Plan:
        """The plan of a folder with what this request adds to it.

        Raises:
            ValueError: it contradicts the plan; the message has what differs.
        """
        asked = dataclasses.replace(plan.base, **TrainConfig.from_dict(self._complete(plan.base)).to_dict())
        changed = differing(plan.base, {name: getattr(asked, name) for name in self.base})
        pairs = {
            "match": (plan.match, self.match),
            "flops": (plan.flops, self.flops),
            "baseline": (plan.baseline, self.baseline),
        }
        changed += [f"{name}: {a!r} -> {b!r}" for name, (a, b) in pairs.items() if b is not None and a != b]
        if self.lrs and not set(plan.lrs) <= set(self.lrs):
            changed.append(f"lr: {_listed(plan.lrs)} -> {_listed(self.lrs)}, which must hold the ones before")
        if self.lr_seeds is not None and set(plan.lr_seeds) != set(self.lr_seeds):
            changed.append(f"lr_seeds: {_listed(plan.lr_seeds)} -> {_listed(self.lr_seeds)}")
        sizes = () if self.sizes is None else parse_sizes(self.sizes, plan.base.preset)
        for size in sizes:
            before = [old for old in plan.sizes if old.label == size.label]
            if before and before[0] != size:
                changed.append(f"size {size.label}: {before[0]} -> {size}")
        if changed:
            raise ValueError(
                f"the folder holds a comparison with other settings ({'; '.join(changed)}); leave these options out to "
                "go on with it, or choose another folder"
            )
        running = {name: value for name, value in self.base.items() if name in RUNNING}
        return dataclasses.replace(
            plan,
            base=dataclasses.replace(plan.base, **running),
            contenders=_more(plan.contenders, self.contenders),
            data=merge(plan.data, self.data),
            sizes=merge_sizes(plan.sizes, sizes),
            seeds=merge(plan.seeds, self.seeds or ()),
            lrs=merge(plan.lrs, self.lrs),
            use=merge(plan.use, self.use),
        )

    def _complete(self, base: TrainConfig) -> dict[str, Any]:
        """The base's fields with this request's in their place; of steps and tokens the one that is asked for."""
        fields = base.to_dict() | self.base
        if "steps" in self.base and "tokens" not in self.base:
            fields["tokens"] = None
        if "tokens" in self.base and "steps" not in self.base:
            fields["steps"] = None
        return fields


def with_contenders(plan: Plan, more: Sequence[Contender]) -> Plan:
    """The plan with further contenders."""
    return dataclasses.replace(plan, contenders=_more(plan.contenders, more))


def merge_sizes(old: Sequence[Size], new: Sequence[Size]) -> tuple[Size, ...]:
    """The old sizes, then those with a new label."""
    labels = [size.label for size in old]
    return (*old, *[size for size in new if size.label not in labels])


def _more(old: Sequence[Contender], new: Sequence[Contender]) -> tuple[Contender, ...]:
    """The old contenders, then the new ones; the same one under another label is refused by the plan."""
    known = {(contender.key, contender.label) for contender in old}
    pinned = pin((*old, *new))[len(old) :]
    return (*old, *[contender for contender in pinned if (contender.key, contender.label) not in known])


def _check_budget(plan: Plan) -> None:
    base = plan.base
    if plan.flops is not None:
        if plan.match != "flops":
            raise ValueError(f"--flops is a budget for --match flops, and this comparison matches {plan.match}")
        if plan.flops <= 0:
            raise ValueError(f"the budget of FLOPs must be positive, got {plan.flops:g}")
        if base.steps is not None or base.tokens is not None:
            raise ValueError("--flops and --steps or --tokens are two budgets; give one of them")


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))
