"""Ranks: what a step needs of the processes that train together. One protocol, several kinds.

The engine walks a window as if there were one process, and calls these methods at the places where other
processes have a say: when labels are counted, around the passes, at each node and head, and when the window's
gradient is complete. What is written here holds where each rank runs its own passes on the bare model; a kind
overrides what it does otherwise, and at least ``complete``.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from mtaccum.errors import ConfigError
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.collectives import Collectives, current_ranks, in_process_group
from mtaccum.parallel.dtensor import full_tensor, is_dtensor, to_local

T = TypeVar("T")
TasksByMicroBatch = Sequence[Sequence[str]]
LossSums = dict[str, tuple[Tensor, torch.dtype]]  # 0-d sums in double, and the losses' own types


@dataclass(frozen=True)
class Agreement:
    """What the ranks know of a window before its first forward.

    Attributes:
        totals: for each enabled task its label count in the window, on all ranks.
        active: for each micro-batch the tasks that have a label on this rank.
        running: for each micro-batch the tasks that this rank runs. More than the active ones where other
            ranks need the passes of this one; there may be more micro-batches too.
    """

    totals: Mapping[str, float]
    active: TasksByMicroBatch
    running: TasksByMicroBatch


class Ranks(ABC):
    """A way to train on the processes of a group, seen from one of them.

    Args:
        collectives: the small agreements; None: those of PyTorch's default process group.
    """

    kind: ClassVar[str]
    """Its name among the options, and in messages."""

    averages: ClassVar[bool] = True
    """Whether gradients become their mean over the ranks, rather than their sum."""

    shares_gradients: ClassVar[bool] = False
    """Whether a gradient is that of all ranks already after a backward, rather than this rank's own."""

    comm_hook: str = "none"
    """How gradients are compressed while they travel."""

    def __init__(self, collectives: Collectives | None = None) -> None:
        self.collectives = current_ranks() if collectives is None else collectives

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self.collectives.world_size

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.collectives.is_rank_zero

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        return self.collectives.any(flag)

    # --- when an engine is made ---

    @classmethod
    def conflict(cls, options: Any) -> str | None:
        """Why some options of a step don't go with this kind, whatever the model; None if all do."""
        return None

    def check(self, model: MultiTaskModel, options: Any, scaler: Any) -> None:
        """Refuse what doesn't go together, before anything has changed.

        Raises:
            ConfigError: options that this kind, or the device, can't do.
        """
        if options.comm_hook not in ("none", self.comm_hook):
            raise ConfigError(
                f"comm_hook={options.comm_hook!r} doesn't reach a {type(self).__name__} that is handed in, "
                f"whose own is {self.comm_hook!r}. Give it there: DDP(comm_hook={options.comm_hook!r})."
            )
        if self.world_size == 1 or model.device.type == "cuda":
            return
        if options.comm_hook == "bf16":
            raise ConfigError(
                f"comm_hook=bf16 works on CUDA only, and the model is on {model.device}. Use comm_hook=fp16, "
                f"or none."
            )
        if options.batchnorm == "sync":
            raise ConfigError(
                f"batchnorm=sync works on CUDA only, and the model is on {model.device}. Use batchnorm=keep: "
                f"running statistics are averaged over the ranks before they are used."
            )

    def start(self, model: MultiTaskModel, parameters: Sequence[Tensor]) -> None:
        """Let all ranks begin with the values of rank 0.

        Args:
            parameters: the model's, and what else the optimizer holds.

        Raises:
            ConfigError: models that differ between ranks, whose gradients would be added to those of other
                parameters.
        """
        if self.world_size == 1:
            return
        own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
        own += [(name, tuple(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
        for rank, theirs in enumerate(self.collectives.all_gather_object(own)):
            if theirs != own:
                mine, other = next(pair for pair in zip_longest(own, theirs) if pair[0] != pair[1])
                raise ConfigError(
                    f"all ranks must train the same model, but rank {self.rank} has {_entry(mine)} where "
                    f"rank {rank} has {_entry(other)}."
                )
        self.collectives.broadcast_tensors(model, *parameters)

    # --- in a step, in this order ---

    def before_step(self, model: MultiTaskModel) -> None:
        """Refuse what may have changed since the last step.

        Raises:
            ConfigError: says what; here, that there are other ranks by now.
        """
        if self.world_size == 1 and in_process_group():
            raise ConfigError(
                "the engine was made before the ranks were joined, and would train this one by itself. Make "
                "it, and its ranks, inside of mtaccum.parallel.joined(), or with parallel='none'."
            )

    def agree(
        self, weights: Mapping[str, float], totals: Mapping[str, float], active: TasksByMicroBatch
    ) -> Agreement:
        """Learn what the other ranks have in this window.

        Args:
            weights: of the enabled tasks.
            totals: their label counts in the window on this rank.
            active: for each micro-batch the tasks that have a label.

        Raises:
            ConfigError: the ranks train different tasks.
        """
        if self.world_size == 1:
            return Agreement(totals, active, active)
        tasks = ", ".join(f"{name} (weight {weight})" for name, weight in weights.items())
        mark = float(zlib.crc32(tasks.encode()))
        largest, smallest = self.collectives.all_reduce_max([mark, -mark])
        if largest != -smallest:
            of_ranks = enumerate(self.collectives.all_gather_object(tasks))
            given = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in of_ranks)
            raise ConfigError(f"all ranks must train the same tasks in the same order, but {given}.")
        sums = self.collectives.all_reduce_sum(list(totals.values()))
        return Agreement(dict(zip(totals, sums, strict=True)), active, active)

    @contextmanager
    def window(
        self, model: MultiTaskModel, agreement: Agreement, *, searching: bool = False
    ) -> Iterator[None]:
        """Around all passes of a window.

        Args:
            searching: whether the gradients are looked at after each backward and then dropped.
        """
        yield

    def micro_batches(self, window: Sequence[Any]) -> Iterable[Any]:
        """The micro-batches to run, as many as the agreement has."""
        return window

    def before_micro_batch(self, index: int, tasks: Sequence[str]) -> None:
        """A micro-batch begins.

        Args:
            tasks: in the order in which their heads run.
        """

    def run_node(self, name: str, forward: Callable[[], T]) -> T:
        """The features of a trunk or neck, by its forward."""
        return forward()

    def run_head(
        self, name: str, forward: Callable[[], Any], loss: Callable[[], tuple[Any, Tensor]]
    ) -> Tensor:
        """A task's loss on this micro-batch.

        Args:
            forward: makes the prediction alone.
            loss: makes prediction and loss; only for a task that has labels here.
        """
        return loss()[1]

    @abstractmethod
    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """The window's backwards are done: let each gradient be that of all ranks together, and None where no
        rank has one. Called on all ranks, with the same parameters in the same order."""

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Euclidean norm of all gradients together (0-d); 0 if there is none."""
        gradients = [norm_values(p.grad) for p in parameters if p.grad is not None]
        sharded = [gradient for gradient in gradients if is_dtensor(gradient)]
        if not sharded:
            return nn.utils.get_total_norm(gradients)
        norms = [full_tensor(nn.utils.get_total_norm(sharded))]
        if plain := [gradient for gradient in gradients if not is_dtensor(gradient)]:
            norms.append(nn.utils.get_total_norm(plain).to(norms[0]))
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scale all gradients, whose norm is ``norm``, so that it is at most ``max_norm``."""
        learned = [parameter for parameter in parameters if parameter.grad is not None]
        if not any(is_dtensor(parameter.grad) for parameter in learned):
            nn.utils.clip_grads_with_norm_(learned, max_norm, norm)
            return
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch has it
        for parameter in learned:
            to_local(parameter.grad).mul_(factor)  # type: ignore[arg-type]

    def sum_losses(self, sums: LossSums, device: torch.device) -> LossSums:
        """Sums of losses by name over all ranks, of which some may have run other tasks."""
        if self.world_size == 1:
            return sums
        own = {name: dtype for name, (_, dtype) in sums.items()}
        dtypes = {name: of for own in self.collectives.all_gather_object(own) for name, of in own.items()}
        if not dtypes:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=device)
        stacked = torch.stack([sums[name][0] if name in sums else zero for name in dtypes])
        totals = self.collectives.all_reduce_tensor(stacked).unbind()
        return {name: (total, dtypes[name]) for name, total in zip(dtypes, totals, strict=True)}

    def earliest(self, finding: str | None, backwards: int, *, in_gradient: bool) -> str | None:
        """What was found first of all that the ranks have found while they ran a window again.

        Args:
            finding: of this rank; None if there is none.
            backwards: how many backwards there were before it.
            in_gradient: whether it was found in a gradient, rather than in a loss.
        """
        if finding is not None and self.world_size > 1 and not (in_gradient and self.shares_gradients):
            finding = f"rank {self.rank}: {finding}"
        found = self.collectives.all_gather_object((backwards, in_gradient, finding))
        return min((f for f in found if f[2]), key=lambda f: f[:2], default=(0, False, None))[2]

    # --- whenever somebody looks at the model ---

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a parameter or gradient."""
        return tensor

    def evaluated(self, model: MultiTaskModel) -> MultiTaskModel:
        """A model whose forwards need no other rank. Called on all ranks."""
        return model


def norm_values(gradient: Tensor) -> Tensor:
    """A sparse gradient's values, which have its norm; others as they are."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _entry(entry: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if entry is None:
        return "nothing"
    name, shape, dtype, learns = entry
    return f"{name} {shape} of {dtype}, {'trainable' if learns else 'not trainable'}"
