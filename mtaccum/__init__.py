"""mtaccum: train many heads on one trunk with the memory of the trunk plus one head."""

from typing import TYPE_CHECKING, Any

from mtaccum.batch import register_split, split_batch, windows
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
    "reduce_gradients",
    "register_split",
    "register_structure",
    "register_task",
    "sequential_backward",
    "split_backward",
    "split_batch",
    "windows",
]


def __getattr__(name: str) -> Any:
    # On first use: loading needs hydra, evaluation rich, planning fake tensors, a loop of your own none.
    if name == "check_exactness":
        from mtaccum.exactness import check_exactness

        return check_exactness
    if name == "reduce_gradients":
        from mtaccum.parallel import reduce_gradients

        return reduce_gradients
    if name == "find_plan":
        from mtaccum.planning import find_plan

        return find_plan
    if name == "load":
        from mtaccum.config import load

        return load
    if name == "evaluate":
        from mtaccum.training import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
