"""The engine: one window in, one optimizer step out; and the schedules as plain calls."""

from mtaccum.engine.engine import Engine
from mtaccum.engine.functional import sequential_backward, split_backward
from mtaccum.engine.label_counts import LabelCounts
from mtaccum.engine.options import StepOptions
from mtaccum.engine.result import StepResult
from mtaccum.engine.schedules import SCHEDULES

__all__ = [
    "SCHEDULES",
    "Engine",
    "LabelCounts",
    "StepOptions",
    "StepResult",
    "sequential_backward",
    "split_backward",
]
