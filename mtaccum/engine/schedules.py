"""The three schedules: in which order the forwards and backwards of one micro-batch run.

Each walks a forest of nodes depth-first, so the forwards run in the same order in all three. None of them
keeps a graph longer than its own backward (there is no ``retain_graph``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from mtaccum.engine.cut import Cut
from mtaccum.errors import InplaceError, TaskError, first_line
from mtaccum.observe import BACKWARD, FORWARD, announce_cut, stage
from mtaccum.state import Replay
from mtaccum.structure import tensors_of
from mtaccum.torch_internals import version_of

Features = Mapping[str, Any]
Backward = Callable[[Tensor], object]


@dataclass(frozen=True)
class Node:
    """One forward to run on one micro-batch.

    Attributes:
        name: under which its children find its features.
        run: takes the features of all nodes above by name. A node with children returns its own
            features; one without returns its loss, a 0-d tensor, already scaled.
        children: the nodes that get its features.
        module: whose buffers a repeat must not move; None if unknown.
        learns: whether the gradient of this loss goes to the nodes above (leaves only).
        reads: what it reads besides, and others too: the batch.
    """

    name: str
    run: Callable[[Features], Any]
    children: tuple[Node, ...] = ()
    module: nn.Module | None = None
    learns: bool = True
    reads: Any = None

    @property
    def needs_graph(self) -> bool:
        """Whether any loss below sends a gradient into this node."""
        return any(c.needs_graph if c.children else c.learns for c in self.children)


def summed(roots: Sequence[Node], above: Features, backward: Backward) -> None:
    """The baseline: all forwards, the sum of the losses, one backward. Alive at the peak: everything."""
    losses = [loss for loss in _all_losses(roots, above) if loss.requires_grad]
    if losses:
        with torch.enable_grad():
            total = sum(losses[1:], start=losses[0])
        del losses
        run_backward("all tasks", total, backward)


def _all_losses(nodes: Sequence[Node], above: Features) -> Iterator[Tensor]:
    for node in nodes:
        if node.children:
            features = run_inner(node, above, graph=node.needs_graph)
            yield from _all_losses(node.children, {**above, node.name: features})
        else:
            yield run_leaf(node, above)


def sequential(roots: Sequence[Node], above: Features, backward: Backward) -> None:
    """For each loss: its whole path forward, backward, free. Alive at the peak: one path.

    A node on several paths runs once for each; the repeats see and change what the first one did.
    """
    replays: dict[str, Replay] = {}
    for *inner, leaf in paths(roots):
        features = dict(above)
        repeated: list[Replay] = []
        for node in inner:
            with _once(node, replays, repeated):
                features[node.name] = run_inner(node, features, graph=leaf.learns)
        run_backward(leaf.name, run_leaf(leaf, features), backward, repeated)


def split(roots: Sequence[Node], above: Features, backward: Backward) -> None:
    """Run a node, cut its features, let each child finish, send the gradient back through the node.

    Alive at the peak: the trunk and one head.
    """
    for node in roots:
        if node.children:
            cut = Cut(run_inner(node, above, graph=node.needs_graph))
            announce_cut(cut.leaves)
            split(node.children, {**above, node.name: cut.features}, backward)
            with stage(node.name, BACKWARD), _explained_backward():
                cut.send_back()
        else:
            run_backward(node.name, run_leaf(node, above), backward)


SCHEDULES: dict[str, Callable[[Sequence[Node], Features, Backward], None]] = {
    "summed": summed,
    "sequential": sequential,
    "split": split,
}
"""By name; each takes the roots, the inputs by ``ROOT``, and what runs the backward of a loss."""


def paths(roots: Sequence[Node]) -> Iterator[tuple[Node, ...]]:
    """The paths from a root to each leaf, in depth-first order."""
    for node in roots:
        if not node.children:
            yield (node,)
        for path in paths(node.children):
            yield (node, *path)


def _once(node: Node, replays: dict[str, Replay], repeated: list[Replay]) -> AbstractContextManager[None]:
    """The first pass of a node on this micro-batch, or a replay of it, which is noted in ``repeated``."""
    if node.name in replays:
        repeated.append(replays[node.name])
        return replays[node.name].repeat()
    if sum(1 for _ in paths(node.children)) == 1:
        return nullcontext()  # on one path only: there will be no repeat
    replays[node.name] = Replay()
    return replays[node.name].first(node.module)


def run_inner(node: Node, above: Features, *, graph: bool) -> Any:
    """Features of a node with children, with or without the graph that made them."""
    with torch.set_grad_enabled(graph):
        features = _run(node, above)
    if not graph:
        torch.clear_autocast_cache()  # inside a caller's autocast: weights that it cast without a graph
    return features


def run_leaf(node: Node, above: Features) -> Tensor:
    """The scaled loss of a node without children."""
    with torch.enable_grad():
        loss: Tensor = _run(node, above)
        return loss


def run_backward(name: str, loss: Tensor, backward: Backward, repeated: Sequence[Replay] = ()) -> None:
    """Backward of one loss, through the given repeats; a constant one has none."""
    if not loss.requires_grad:
        return
    with stage(name, BACKWARD), _explained_backward(), ExitStack() as repeats:
        for replay in repeated:
            repeats.enter_context(replay.in_backward())
        backward(loss)


@contextmanager
def _explained_backward() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise TaskError(
            f"a recomputed segment, or a checkpoint of your own, did not do the same when it ran again: "
            f"{first_line(error)} Its forward must depend on nothing but its inputs, parameters, buffers and "
            f"random numbers of PyTorch, NumPy and Python. Recompute another segment."
        ) from error
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise TaskError(
                "a loss reached a graph that another loss's backward had freed already. Compute each loss "
                "from the features passed to its function, not from a variable outside of it."
            ) from error
        raise


def _run(node: Node, above: Features) -> Any:
    """Run a node and make sure that it left alone what others read too.

    Without the check a head with an in-place ReLU in front would change what the next one sees: PyTorch
    complains only if the tensor is a leaf or is needed for a backward.
    """
    shared = tensors_of([dict(above), node.reads], strict=False)
    before = [_condition(tensor) for tensor in shared]
    try:
        with stage(node.name, FORWARD):
            result = node.run(above)
    except RuntimeError as error:
        if "leaf Variable that requires grad" in str(error) and "in-place" in str(error):
            raise InplaceError(_inplace_message(node)) from error
        raise
    if before != [_condition(tensor) for tensor in shared]:
        raise InplaceError(_inplace_message(node))
    return result


def _condition(tensor: Tensor) -> tuple[int, bool, torch.Size | None]:
    """What an operation in place changes: PyTorch counts these, and some only change what the tensor says."""
    has_shape = not tensor.is_nested or tensor.layout is torch.jagged
    return version_of(tensor), tensor.requires_grad, tensor.shape if has_shape else None


def _inplace_message(node: Node) -> str:
    return (
        f"{node.name!r} writes in place into the features or the batch it was given, which others read too. "
        f"Let its first operation make a new tensor: nn.ReLU() instead of nn.ReLU(inplace=True), x = x + y "
        f"instead of x += y, or x.clone() first."
    )
