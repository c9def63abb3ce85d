"""FSDP: training a model whose nodes were sharded by ``shard``.

FSDP2 gathers a node's parameters for each of its passes, so all ranks run in lockstep. Each node reduces its
gradients in its last backward of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from mtaccum.errors import ConfigError, TaskError
from mtaccum.model.tree import MultiTaskModel, Tree
from mtaccum.parallel.collectives import Collectives
from mtaccum.parallel.ddp import DDP
from mtaccum.parallel.dtensor import to_local
from mtaccum.parallel.lockstep import active_in, filled_up, union_of, zero_through
from mtaccum.parallel.ranks import Agreement, Ranks, TasksByMicroBatch
from mtaccum.parallel.sharding import check_modes, sharded_nodes, unsharded
from mtaccum.parallel.tracking import GradientTracking, tracking_of
from mtaccum.state import without_trace

T = TypeVar("T")


class FSDP(Ranks):
    """Runs the passes of all ranks in lockstep.

    Args:
        model: sharded.
        collectives: None: those of PyTorch's default process group.
    """

    kind: ClassVar[str] = "fsdp"
    shares_gradients: ClassVar[bool] = True

    def __init__(self, model: MultiTaskModel, collectives: Collectives | None = None) -> None:
        super().__init__(collectives)
        self._model = model
        self._replicated = DDP(self.collectives)  # for what the optimizer holds besides the model
        self._agreement = Agreement({}, (), ())
        self._active: Sequence[str] = ()  # tasks that have a label in the micro-batch that runs
        self._searching = False

    @classmethod
    def conflict(cls, options: Any) -> str | None:
        given = {
            "compile": options.compile is not False,
            "chunks": bool(options.chunked),
            "precision=fp16": options.precision == "fp16",
            "comm_hook": options.comm_hook != "none",
        }
        refused = next((name for name, is_given in given.items() if is_given), None)
        return None if refused is None else _refusal(refused)

    def check(self, model: MultiTaskModel, options: Any, scaler: Any) -> None:
        if (reason := self.conflict(options)) is not None:
            raise ConfigError(reason)
        if scaler is not None:
            raise ConfigError(_refusal("scaler"))
        super().check(model, options, scaler)

    def before_step(self, model: MultiTaskModel) -> None:
        super().before_step(model)
        _refuse_broken({name: tracking_of(node) for name, node in sharded_nodes(model).items()})
        check_modes(model)

    def agree(
        self, weights: Mapping[str, float], totals: Mapping[str, float], active: TasksByMicroBatch
    ) -> Agreement:
        agreement = super().agree(weights, totals, active)
        of_ranks = self.collectives.all_gather_object([list(tasks) for tasks in active])
        return replace(agreement, running=union_of(list(totals), of_ranks))

    @contextmanager
    def window(
        self, model: MultiTaskModel, agreement: Agreement, *, searching: bool = False
    ) -> Iterator[None]:
        """Afterwards parameters that no rank's loss has reached have no gradient.

        Raises:
            TaskError: a pass failed in an earlier window, from which PyTorch can't go on; or a node's
                gradients were not reduced.
        """
        self._agreement, self._searching = agreement, searching
        if searching:
            yield
            return
        nodes = sharded_nodes(model)
        tracked = {name: tracking_of(node) for name, node in nodes.items()}
        for tracking in tracked.values():
            tracking.reached.clear()
            tracking.reduces_after = None
        try:
            yield
        except BaseException:
            for tracking in tracked.values():
                tracking.broken = True
            raise
        self._drop_unreached(nodes, tracked)

    def _drop_unreached(self, nodes: Mapping[str, Any], tracked: Mapping[str, GradientTracking]) -> None:
        """Let parameters that no rank's loss has reached have no gradient."""
        named = [(node, name, p) for node, module in nodes.items() for name, p in module.named_parameters()]
        by_any = self.collectives.all_reduce_max([float(n in tracked[node].reached) for node, n, _ in named])
        unreduced = []
        for (node, _, parameter), reached in zip(named, by_any, strict=True):
            if not reached:
                parameter.grad = None
            elif parameter.grad is None:
                unreduced.append(node)
        for node in unreduced:
            _refuse_unreduced(node, tracked[node])

    def micro_batches(self, window: Sequence[Any]) -> list[Any]:
        return filled_up(window, self._agreement, self.collectives)

    def before_micro_batch(self, index: int, tasks: Sequence[str]) -> None:
        """Find the task with which each node learns for the last time in the window."""
        self._active = active_in(self._agreement, index)
        order = list(_leaves(self._model.tree(tasks)))
        for name, node in sharded_nodes(self._model).items():
            tracking = tracking_of(node)
            below = {task for task in self._model.tasks_below(name) if task == name or self._sends_back(task)}
            running = self._agreement.running
            last = max((i for i, names in enumerate(running) if below & set(names)), default=-1)
            if index == last:
                *_, tracking.reduces_after = (task for task in order if task in below)
            tracking.counts = bool(below & set(self._active))
            node.set_requires_gradient_sync(self._searching)

    def run_node(self, name: str, forward: Callable[[], T]) -> T:
        if set(self._model.tasks_below(name)) & set(self._active):
            return forward()
        with without_trace(self._model.node(name)):
            return forward()

    def run_head(
        self, name: str, forward: Callable[[], Any], loss: Callable[[], tuple[Any, Tensor]]
    ) -> Tensor:
        for node in sharded_nodes(self._model).values():
            if tracking_of(node).reduces_after == name:
                node.set_requires_gradient_sync(True)
        if name not in self._active:  # it runs since it does on another rank
            with without_trace(self._model.node(name)):
                return zero_through(forward())
        prediction, total = loss()
        if total.requires_grad:
            return total
        # on another rank there may be a backward; its zeros here are no gradient
        if (module := sharded_nodes(self._model).get(name)) is not None:
            tracking_of(module).counts = False
        return total + zero_through(prediction)

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """DTensors were reduced in their backwards, and DDP leaves them alone."""
        self._replicated.complete(parameters)

    def local(self, tensor: Tensor) -> Tensor:
        return to_local(tensor)

    def evaluated(self, model: MultiTaskModel) -> MultiTaskModel:
        return unsharded(model)

    def _sends_back(self, task: str) -> bool:
        return self._model.task(task).mode != "detached"


def _refusal(name: str) -> str:
    return f"{name} doesn't go with parallel=fsdp; use parallel=ddp, or leave it out."


def _leaves(tree: Tree) -> Iterator[str]:
    for name, below in tree.items():
        yield from _leaves(below) if below else (name,)


def _refuse_broken(tracked: Mapping[str, GradientTracking]) -> None:
    if any(tracking.broken for tracking in tracked.values()):
        raise TaskError(
            "an earlier step failed while parameters were gathered from the ranks, and they can't be sharded "
            "again. Start all ranks again, from a checkpoint."
        )


def _refuse_unreduced(name: str, tracking: GradientTracking) -> None:
    """Gradients are reduced in a node's last backward; there is none if a head doesn't send anything back."""
    if tracking.reduces_after is None:
        return
    tracking.broken = True
    raise TaskError(
        f"under parallel=fsdp {name!r} can't learn here: the last task in the window to teach it is "
        f"{tracking.reduces_after!r}, and sends it no gradient. If the head is meant to send none, say so by "
        f"mode='detached'."
    )
