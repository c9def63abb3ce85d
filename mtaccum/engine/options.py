"""Step options: everything that says how a step is run, apart from model and optimizer.

A new lever is one field here, one check (of its own value beside the field, of what it goes with among
``CONFLICTS``, of what the model must be like in ``checks``), and one place that acts on it (``levers``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Self, TypeVar

from mtaccum.engine.option_values import (
    FrozenDict,
    OneOf,
    at_least_one,
    chunk_numbers,
    compile_options,
    head_groups,
    module_names,
    positive_or_none,
    true_or_false,
)
from mtaccum.errors import ConfigError, unknown_name

C = TypeVar("C", bound=Callable[..., Any])

SCHEDULES = ("summed", "sequential", "split")
PRECISIONS = ("fp32", "bf16", "fp16")
BATCHNORM = ("keep", "freeze", "sync")
REACTIONS = ("raise", "skip")
COMM_HOOKS = ("none", "fp16", "bf16")


def option(default: Any, checked: Callable[[str, Any], Any]) -> Any:
    """A field whose value is checked, and brought into its lasting form, by ``checked(name, value)``."""
    return field(default=default, metadata={"checked": checked})


@dataclass(frozen=True)
class StepOptions:
    """How a step is run. Frozen and hashable; made by ``Engine`` from its keyword arguments, or by a plan.

    Attributes:
        schedule: ``split``, ``sequential`` or ``summed``.
        max_grad_norm: clip the gradient of all tasks together to this norm, once per step; None: don't.
        precision: ``fp32``, the parameters' own precision; ``bf16`` or ``fp16``: autocast to it.
        on_nonfinite: when a loss or gradient of a step is NaN or infinite: ``raise`` an error that names
            task and place, or ``skip`` the whole step and log it. Gradients that overflow for a scaler's
            factor alone are always skipped. Either way nothing was changed by the step.
        max_skipped: so many steps skipped in a row are an error.
        batchnorm: ``keep``: layers normalise by the micro-batch, and the momentum of running statistics is
            corrected for the number of passes; ``freeze``: they normalise by their running statistics;
            ``sync``: they become ``torch.nn.SyncBatchNorm``.
        recompute: segments that keep no graph and run once more for their backward: names of nodes and of
            modules in them (``trunk.layer1``), patterns (``trunk.layer*``), runs of a Sequential's children
            (``trunk.layer3[0:3]``).
        compile: run each node (of one with recomputed segments: these) by ``torch.compile``; a dict is its
            options.
        head_groups: lists of tasks on one node that run forward together and share a backward. Each backward
            costs some time whatever it computes, so small heads are faster so; in memory a head group is one
            head.
        chunks: for a task into how many chunks its head and loss take each micro-batch (``split`` only); a
            chunk's graph is freed before the next one runs. Each tensor of its features is split along the
            first dimension; what is no tensor goes into all chunks. Random numbers are drawn chunk by chunk,
            so others than for the whole micro-batch.
        offload: keep saved activations in pinned host memory until the backward (CUDA only).
        comm_hook: ``fp16`` or ``bf16``: gradients travel between ranks in 16 bits; ``none``: as they are.

    Raises:
        ConfigError: a value that isn't valid, or options that don't go together.
    """

    schedule: str = option("split", OneOf(SCHEDULES))
    max_grad_norm: float | None = option(None, positive_or_none)
    precision: str = option("fp32", OneOf(PRECISIONS))
    on_nonfinite: str = option("raise", OneOf(REACTIONS))
    max_skipped: int = option(20, at_least_one)
    batchnorm: str = option("keep", OneOf(BATCHNORM))
    recompute: tuple[str, ...] = option((), module_names)
    compile: bool | Mapping[str, Any] = option(False, compile_options)
    head_groups: tuple[tuple[str, ...], ...] = option((), head_groups)
    chunks: Mapping[str, int] = option(FrozenDict(), chunk_numbers)
    offload: bool = option(False, true_or_false)
    comm_hook: str = option("none", OneOf(COMM_HOOKS))

    def __post_init__(self) -> None:
        for option in fields(self):
            value = option.metadata["checked"](option.name, getattr(self, option.name))
            object.__setattr__(self, option.name, value)
        if (reason := self.conflict()) is not None:
            raise ConfigError(reason)

    def conflict(self) -> str | None:
        """Why the options don't go together; None if they do."""
        return next((reason for find in CONFLICTS if (reason := find(self)) is not None), None)

    def changed(self, options: Mapping[str, Any]) -> Self:
        """The same options but for some.

        Raises:
            ConfigError: there is no option of that name.
        """
        known = [option.name for option in fields(self)]
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(unknown_name("option of a step", unknown[0], known))
        return replace(self, **options) if options else self

    def given(self) -> dict[str, Any]:
        """The options that aren't the default, as plain lists and dicts."""
        values = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        return {name: plain(value) for name, (value, default) in values.items() if value != default}

    @property
    def chunked(self) -> dict[str, int]:
        """The tasks that do run in chunks, with the numbers of these."""
        return {task: number for task, number in self.chunks.items() if number > 1}

    def head_group_of(self, task: str) -> tuple[str, ...]:
        """The tasks that a task shares a backward with, itself included."""
        return next((group for group in self.head_groups if task in group), (task,))

    def in_order(self, tasks: Iterable[str]) -> list[str]:
        """Tasks as they are run: those of a head group where the first of them stands."""
        tasks = list(tasks)
        members = ([other for other in tasks if other in self.head_group_of(name)] for name in tasks)
        return list(dict.fromkeys(chain.from_iterable(members)))


def takes_step_options(target: C) -> C:
    """Show the ``**step_options`` of a function or class as the options that they stand for."""
    signature = inspect.signature(target)
    given = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    given += [
        inspect.Parameter(option.name, keyword, default=option.default, annotation=option.type)
        for option in fields(StepOptions)
    ]
    setattr(target, "__signature__", signature.replace(parameters=given))  # noqa: B010 (of any callable)
    return target


def plain(value: Any) -> Any:
    """Tuples as lists and frozen dicts as dicts, as YAML and JSON have them."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


# --- what goes together: each finds one reason against, or None ---


def _head_groups_without_backwards(options: StepOptions) -> str | None:
    if options.head_groups and options.schedule == "summed":
        return "head_groups has no effect with schedule='summed', where all heads share one backward."
    return None


def _chunks_without_split(options: StepOptions) -> str | None:
    if options.chunked and options.schedule != "split":
        return (
            f"chunks belongs to schedule='split', where a trunk runs once for all of them; with "
            f"{options.schedule!r} use more micro-batches."
        )
    return None


def _chunks_in_a_head_group(options: StepOptions) -> str | None:
    for name in chain.from_iterable(options.head_groups):
        if name in options.chunked:
            return f"{name!r} can't be in a head group and run in chunks: choose one of these."
    return None


CONFLICTS: list[Callable[[StepOptions], str | None]] = [
    _head_groups_without_backwards,
    _chunks_without_split,
    _chunks_in_a_head_group,
]


# --- the table of what goes with what, for the documentation ---

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "max_grad_norm": {"max_grad_norm": 1.0},
    "precision=bf16": {"precision": "bf16"},
    "precision=fp16": {"precision": "fp16"},
    "on_nonfinite=skip": {"on_nonfinite": "skip"},
    "batchnorm=freeze": {"batchnorm": "freeze"},
    "batchnorm=sync": {"batchnorm": "sync"},
    "recompute": {"recompute": ("trunk",)},
    "compile": {"compile": True},
    "head_groups": {"head_groups": (("a", "b"),)},
    "chunks": {"chunks": {"a": 2}},
    "offload": {"offload": True},
    "comm_hook=fp16": {"comm_hook": "fp16"},
}


def compatibility(kinds: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str | None]]:
    """For each example of an option, schedule and kind of ranks why they don't go together, or None.

    Args:
        kinds: classes of ranks by name.
    """
    for name, example in EXAMPLES.items():
        for schedule in SCHEDULES:
            for kind, ranks in kinds.items():
                try:
                    reason = ranks.conflict(StepOptions(schedule, **example))
                except ConfigError as error:
                    reason = str(error)
                yield name, schedule, kind, reason
