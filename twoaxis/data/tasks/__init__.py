"""Diagnostic tasks: made by code, each with a known solver and a known chance level; they need numpy only."""

from twoaxis.data.tasks.task import UNSCORED, Examples, Task, make_task, task_names

__all__ = ["UNSCORED", "Examples", "Task", "make_task", "task_names"]
