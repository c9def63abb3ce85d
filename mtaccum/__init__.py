"""mtaccum: train many heads on one trunk with the memory of the trunk plus one head."""

import importlib
from typing import TYPE_CHECKING, Any

from mtaccum.batch import path, register_split, split_batch, windows
from mtaccum.engine import Engine, LabelCounts, StepOptions, StepResult, sequential_backward, split_backward
from mtaccum.errors import (
    BatchError,
    BudgetError,
    ConfigError,
    FeatureError,
    InexactWarning,
    InplaceError,
    LabelError,
    MtaccumError,
    NonfiniteError,
    OptimizerError,
    PredictionError,
    TaskError,
)
from mtaccum.model import MultiTaskModel, Neck
from mtaccum.structure import register_structure
from mtaccum.tasks import Classification, Regression, Segmentation, Task, register_task

if TYPE_CHECKING:
    from mtaccum.config import load
    from mtaccum.exactness import check_exactness
    from mtaccum.parallel import reduce_gradients
    from mtaccum.planning import find_plan
    from mtaccum.training import evaluate

__version__ = "0.2.0"

__all__ = [
    "BatchError",
    "BudgetError",
    "Classification",
    "ConfigError",
    "Engine",
    "FeatureError",
    "InexactWarning",
    "InplaceError",
    "LabelCounts",
    "LabelError",
    "MtaccumError",
    "MultiTaskModel",
    "Neck",
    "NonfiniteError",
    "OptimizerError",
    "PredictionError",
    "Regression",
    "Segmentation",
    "StepOptions",
    "StepResult",
    "Task",
    "TaskError",
    "__version__",
    "check_exactness",
    "evaluate",
    "find_plan",
    "load",
    "path",
    "reduce_gradients",
    "register_split",
    "register_structure",
    "register_task",
    "sequential_backward",
    "split_backward",
    "split_batch",
    "windows",
]


# On first use: loading needs hydra, evaluation rich, planning fake tensors, a loop of your own none.
_LATER = {
    "check_exactness": "mtaccum.exactness",
    "evaluate": "mtaccum.training",
    "find_plan": "mtaccum.planning",
    "load": "mtaccum.config",
    "reduce_gradients": "mtaccum.parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
