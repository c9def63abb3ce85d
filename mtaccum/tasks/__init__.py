"""Tasks: the base class, the registry, and the built-in ones."""

from mtaccum.tasks.base import MODES, Task
from mtaccum.tasks.builtin import Classification, Regression, Segmentation
from mtaccum.tasks.registry import register_task, task_class, task_types

__all__ = [
    "MODES",
    "Classification",
    "Regression",
    "Segmentation",
    "Task",
    "register_task",
    "task_class",
    "task_types",
]
