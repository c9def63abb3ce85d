"""PyTorch's internals that mtaccum relies on: all in one place, each with what breaks without it.

None of them is documented, so a release of PyTorch may move or drop any. Each is looked up when a module that
needs it is imported; where it is missing, the error says what for, and which versions are known to have it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    BatchNorm, RunningNorm = _BatchNorm, _NormBase

VERSIONS = "2.13 to 2.14"
"""Of PyTorch, with which the tests were run."""

# name here: module and name in PyTorch, and what can't be done without it
_PLACES: dict[str, tuple[str, str, str]] = {
    "BatchNorm": ("torch.nn.modules.batchnorm", "_BatchNorm", "BatchNorm layers can't be told from others"),
    "RunningNorm": ("torch.nn.modules.batchnorm", "_NormBase", "running statistics would move too often"),
    "TorchDispatchMode": (
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "operations can't be observed",
    ),
    "is_wrapper": (
        "torch.utils._python_dispatch",
        "is_traceable_wrapper_subclass",
        "tensors that wrap others would be counted as empty",
    ),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode", "steps can't be predicted"),
    "DataDependentOutput": (
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException",
        "operations that read values can't be named",
    ),
    "DynamicOutputShape": (
        "torch._subclasses.fake_tensor",
        "DynamicOutputShapeException",
        "operations whose shape depends on values can't be named",
    ),
    "UnsupportedOperator": (
        "torch._subclasses.fake_tensor",
        "UnsupportedOperatorException",
        "operations that can't be predicted can't be named",
    ),
    "is_lazy": ("torch.nn.parameter", "is_lazy", "lazy modules can't be told from others"),
    "flop_registry": ("torch.utils.flop_counter", "flop_registry", "FLOPs can't be counted"),
    "sdpa_flops": ("torch.utils.flop_counter", "sdpa_flop_count", "FLOPs of attention can't be counted"),
    "sdpa_backward_flops": (
        "torch.utils.flop_counter",
        "sdpa_backward_flop_count",
        "FLOPs of attention can't be counted",
    ),
    "graph_task": ("torch._C", "_current_graph_task_id", "a backward can't be told from a forward"),
    "sequence_number": ("torch._C._autograd", "_get_sequence_nr", "a profile can't tell where a backward is"),
    "running_graph_node": ("torch._C", "_current_autograd_node", "a profile can't tell where a backward is"),
    "compile_settings": ("torch._dynamo", "config", "nodes of one class would stop being compiled"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, attribute, without = _PLACES[name]
    try:
        return getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"PyTorch {torch.__version__} has no {place}.{attribute}, and without it {without}. Versions "
            f"known to have it are {VERSIONS}: pip install 'torch=={VERSIONS.split()[-1]}.*'."
        ) from error


# --- attributes of objects ---

CALL = "_compiled_call_impl"
"""What a module's call runs if it is set, as by ``Module.compile``: hooks, then forward. Recomputed segments
have their hooks inside: weight and spectral norm in their older form are hooks that make the weight."""


def call_of(module: nn.Module) -> Any:
    """What a module's call runs now, its hooks included."""
    return getattr(module, CALL, None) or module._call_impl


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, to be written to: a repeat of a forward works on copies put in here."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, to be written to."""
    return module._parameters


def children_of(module: nn.Module) -> list[nn.Module]:
    """A module's children in their order, one that stands twice twice (``children()`` leaves that out)."""
    return [child for child in module._modules.values() if child is not None]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 where that isn't counted. Without it a head that writes into the
    features of others goes unnoticed."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """``version_of`` each, quickly."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor has none
        return [version_of(tensor) for tensor in tensors]


def address_of(storage: torch.UntypedStorage) -> int:
    """Of the C++ object behind a storage, which outlives Python's. Without it no storage can be followed."""
    return int(storage._cdata)


def graph_node_number(node: Any) -> int:
    """When a node of a graph was made, among all of its thread."""
    return int(node._sequence_nr())


def has_whole_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has a post-accumulate-grad hook."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def timeout_of(process_group: Any) -> timedelta | None:
    """How long a rank waits for the others in a process group; None if that isn't known."""
    backends = [process_group._get_backend(device) for device in process_group._device_types]
    waits = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
    return max(waits, default=None)
