"""The engine: one window in, one optimizer step out; and the schedules as plain calls."""

from mtaccum.engine.engine import Engine
from mtaccum.engine.functional import sequential_backward, split_backward
from mtaccum.engine.result import StepResult
from mtaccum.engine.schedules import SCHEDULES
from mtaccum.engine.window import WindowPlan, windows

__all__ = [
    "SCHEDULES",
    "Engine",
    "StepResult",
    "WindowPlan",
    "sequential_backward",
    "split_backward",
    "windows",
]
