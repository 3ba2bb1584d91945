"""The registry of tasks: one line per task, and the function that builds them by name."""

from __future__ import annotations

from typing import Any

from twoaxis.base.registry import Registry
from twoaxis.data.tasks.task import Task

TASKS: Registry[Task] = Registry(
    "task",
    {
        "recall": "twoaxis.data.tasks.recall:Recall",
        "induction": "twoaxis.data.tasks.induction:Induction",
        "multi_hop": "twoaxis.data.tasks.multi_hop:MultiHop",
        "cross_depth": "twoaxis.data.tasks.cross_depth:CrossDepth",
        "overwrite": "twoaxis.data.tasks.overwrite:Overwrite",
        "local": "twoaxis.data.tasks.local:Local",
    },
)


def task_names() -> tuple[str, ...]:
    """The names `make_task` takes."""
    return TASKS.names()


def make_task(name: str, context: int | None = None, **options: Any) -> Task:
    """A diagnostic task by name.

        make_task("recall", context=64, pairs=8)

    Args:
        name: one of `task_names()`.
        context: tokens of an example. None is the task's own default.
        **options: the task's own; see its Config.
    """
    cls = TASKS.find(name)
    return cls(TASKS.config(name, options), context)
