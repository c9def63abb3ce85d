"""Probes: what a model's modules do while they run. Each looks on by ``observe``, at a copy of the model.

Modules are named as they are called from the node: ``trunk.layer1.bn``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.engine import StepOptions
from mtaccum.model import MultiTaskModel
from mtaccum.observe import OperationObserver, observed
from mtaccum.state import RandomState
from mtaccum.structure import map_tensors, tensors_of


def module_names(model: MultiTaskModel) -> dict[nn.Module, str]:
    """Each module's name in its node; a task's own loss modules by their full names."""
    names = {module: name for name, module in model.named_modules() if name}
    for node, own in model.own_modules().items():
        names |= {module: name for name, module in own.named_modules(prefix=node)}
    for node in (*model.necks, *model.tasks):
        names[model.node(node)] = node
    return names


class Outputs:
    """Outputs of all modules in a first run, held against those of a second one.

    Attributes:
        different: the modules that gave another output in the second run, innermost first.
        single: the modules whose output is in single precision, innermost first.
    """

    def __init__(self) -> None:
        self._outputs: list[tuple[str, list[Tensor]]] = []
        self._position: int | None = None
        self.different: list[str] = []
        self.single: list[str] = []

    def again(self) -> None:
        """The second run begins."""
        self._position = 0

    def left(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        tensors = [tensor.detach() for tensor in tensors_of(output, strict=False)]
        if self._position is None:
            self._outputs.append((name, [tensor.clone() for tensor in tensors]))
            if any(tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) for tensor in tensors):
                self.single.append(name)
            return
        at, self._position = self._position, self._position + 1
        before_name, before = self._outputs[at] if at < len(self._outputs) else ("", [])
        if before_name != name or not same(tensors, before):
            self.different.append(name)

    @property
    def missed(self) -> str | None:
        """The first module that ran in the first run only."""
        if self._position is None or self._position >= len(self._outputs):
            return None
        return self._outputs[self._position][0]


def same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two runs gave the same, up to the rounding of kernels that add in any order."""
    if len(tensors) != len(others):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=0, equal_nan=True)
        for a, b in zip(tensors, others, strict=True)
    )


class CoupledSamples:
    """Finds modules in which the output of one sample depends on another sample.

    By gradients, not by running on fewer samples: random numbers drawn in the forward don't matter.

    Args:
        samples: how many there are, at least 2; only tensors of this first dimension are looked at.

    Attributes:
        found: their names, innermost first.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.found: list[str] = []

    @contextmanager
    def looking(self, model: MultiTaskModel) -> Iterator[None]:
        """Look at all modules that run inside. Each gets its inputs as views of their own, so that a
        gradient with respect to one of them doesn't lead through another one, made from it before."""

        def views(_name: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
            return map_tensors((args, kwargs), _view, strict=False)

        with observed(module_names(model), entered=views, left=self._left):
            yield

    def _left(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if getattr(module, "batch_first", True) is False:
            return  # the first dimension is time
        given, made = self._batched((args, kwargs)), self._batched(output)
        if not given or not made or any(inner.startswith(f"{name}.") for inner in self.found):
            return
        first = made[0][0]
        spread = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype, device=first.device)
        try:
            gradients = torch.autograd.grad(
                (first.flatten() * spread).sum(), given, retain_graph=True, allow_unused=True
            )
        except RuntimeError:  # written into in place since: nothing can be said of it
            return
        if any(gradient is not None and bool(gradient[1:].any()) for gradient in gradients):
            self.found.append(name)

    def _batched(self, nest: Any) -> list[Tensor]:
        return [
            tensor
            for tensor in tensors_of(nest, strict=False)
            if tensor.requires_grad and tensor.dim() > 0 and tensor.shape[0] == self._samples
        ]


def _view(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        return tensor
    if tensor.is_floating_point() and not tensor.requires_grad:  # an input of the model, say
        return tensor.detach().requires_grad_() * 1  # no leaf, so that it may be written into
    return tensor.view_as(tensor)


class DynamicShapes(OperationObserver):  # type: ignore[no-untyped-call]
    """Finds modules with operations whose shape depends on values, or that read a value.

    Attributes:
        found: operations by the name of the module that runs them; "" outside of modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._stack: list[str] = []

    def entered(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        self._stack.append(name)

    def left(self, _name: str, _module: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        self._stack.pop()

    @property
    def innermost(self) -> str:
        """The module that is running."""
        return self._stack[-1] if self._stack else ""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tags = getattr(func, "tags", ())
        reads = torch.Tag.data_dependent_output in tags
        dynamic = torch.Tag.dynamic_output_shape in tags
        if dynamic and func is torch.ops.aten.index.Tensor:  # only by a mask, not by indices
            dynamic = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if reads or dynamic:
            self.found.setdefault(self.innermost, func.name().removeprefix("aten::").split(".")[0])
        return super().run(func, args, kwargs)


@contextmanager
def drawing_heads(model: MultiTaskModel, names: Iterable[str]) -> Iterator[set[str]]:
    """The tasks among these whose heads draw random numbers where they run inside."""
    found: set[str] = set()
    before = RandomState()

    def entered(*_: Any) -> None:
        nonlocal before
        before = RandomState()

    def left(name: str, *_: Any) -> None:
        if not before.is_current():
            found.add(name)

    with observed({model.task(name): name for name in names}, entered=entered, left=left):
        yield found


class GraphsAlive:
    """Counts what is kept for a backward while each node's forward runs, besides parameters and batches.

    Args:
        options: the heads of a head group keep their graphs for each other.

    Attributes:
        seen: for each node the most graphs of heads outside its head group that were alive in its forward,
            and the most bytes that all graphs kept.
    """

    def __init__(self, model: MultiTaskModel, window: Sequence[Any], options: StepOptions) -> None:
        self._model, self._options = model, options
        self._node = ""
        self._given = {
            tensor.untyped_storage().data_ptr()
            for tensor in [*model.parameters(), *model.buffers(), *tensors_of(window, strict=False)]
            if tensor.layout == torch.strided
        }
        self._kept: list[weakref.ref[_Kept]] = []
        self.seen: dict[str, tuple[int, int]] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around the run of a window."""
        nodes = {self._model.node(name): name for name in self._model.own_modules()}
        with (
            observed(nodes, entered=self._entered),
            torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor),
        ):
            yield

    def _keep(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor.detach(), self._node)  # detached: an output that knows its graph would be a cycle
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in self._given:
            self._kept.append(weakref.ref(kept))
        return kept

    def _entered(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        self._node = name
        alive = [kept for reference in self._kept if (kept := reference()) is not None]
        self._kept = [weakref.ref(kept) for kept in alive]
        group = self._options.head_group_of(name)
        heads = {kept.node for kept in alive if kept.node in self._model.tasks}.difference(group)
        storages = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage() for k in alive}
        kept_bytes = sum(storage.nbytes() for storage in storages.values())
        most_heads, most_bytes = self.seen.get(name, (0, 0))
        self.seen[name] = max(most_heads, len(heads)), max(most_bytes, kept_bytes)


class _Kept:
    """A tensor that autograd keeps, and the node in whose forward it was kept."""

    def __init__(self, tensor: Tensor, node: str) -> None:
        self.tensor, self.node = tensor, node
