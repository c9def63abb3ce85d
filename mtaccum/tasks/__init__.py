"""Tasks: the base class, the registry, and the built-in ones."""

from mtaccum.tasks.base import MODES, Task
from mtaccum.tasks.classes import Classification, Segmentation
from mtaccum.tasks.registry import register_task, task_class, task_types
from mtaccum.tasks.regression import Regression

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
