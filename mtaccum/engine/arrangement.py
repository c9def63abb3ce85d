"""Arrangement: which heads share one backward, and which heads take their micro-batch in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from mtaccum.engine.norms import batch_normalised
from mtaccum.errors import ConfigError, unknown_name
from mtaccum.model.tree import MultiTaskModel


@dataclass(frozen=True)
class Arrangement:
    """How the heads of a model are run, apart from the schedule.

    Attributes:
        groups: tasks on one node that run forward together and share a backward. Each backward costs some
            time whatever it computes, so small heads are faster so; in memory a group is one head.
        chunks: for a task into how many parts its head and loss take each micro-batch; a part's graph is
            freed before the next one runs. Random numbers are drawn part by part, so others than for the
            whole.
        joined: whether the heads of a group do share a backward; otherwise they are neighbours only.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    chunks: Mapping[str, int] = field(default_factory=dict)
    joined: bool = True

    @classmethod
    def of(
        cls, model: MultiTaskModel, schedule: str, groups: Sequence[Sequence[str]], chunks: Mapping[str, int]
    ) -> Arrangement:
        """An arrangement that fits a model and a schedule.

        Raises:
            ConfigError: names of no task, groups that overlap or are on several nodes, chunks of a task whose
                loss is no mean over labels, or a schedule under which they would have no effect.
        """
        check_lists("groups", groups)
        if not isinstance(chunks, Mapping):
            raise ConfigError(
                f"chunks must be a dict of numbers by task, such as {{seg: 4}}, got {chunks!r}."
            )
        for name in (*(name for group in groups for name in group), *chunks):
            if name not in model.tasks:
                raise ConfigError(unknown_name("task in groups or chunks:", name, model.tasks))
        _check_groups(model, schedule, groups, chunks)
        _check_chunks(model, schedule, chunks)
        used = {name: number for name, number in chunks.items() if number > 1}
        return cls(tuple(map(tuple, groups)), used)

    def check_coupling(self, model: MultiTaskModel, *, freezes: bool) -> None:
        """Refuse chunks of heads that normalise by what they see; it may change between steps.

        Raises:
            ConfigError: names the layers.
        """
        for name in () if freezes else self.chunks:
            if layers := batch_normalised(model.task(name).head, prefix=name):
                raise ConfigError(
                    f"chunks: {name!r} can't take its micro-batch in parts, since {layers[0]} normalises by "
                    f"what it sees. Use batchnorm='freeze', a layer that doesn't couple samples (GroupNorm), "
                    f"or recompute parts of the head."
                )

    def group_of(self, name: str) -> tuple[str, ...]:
        """The tasks that a task shares a backward with, itself included."""
        return next((group for group in self.groups if name in group), (name,))

    def in_order(self, tasks: Iterable[str]) -> list[str]:
        """Tasks as they are run: those of a group where the first of them stands, among them as given."""
        tasks = list(tasks)
        members = ([other for other in tasks if other in self.group_of(name)] for name in tasks)
        return list(dict.fromkeys(chain.from_iterable(members)))

    def apart(self) -> Arrangement:
        """The same heads in the same order and chunks, so that they draw the same random numbers, but with a
        backward for each."""
        return replace(self, joined=False)


def check_lists(what: str, lists: Any) -> None:
    """Refuse anything but a list of lists of names."""
    valid = isinstance(lists, Sequence) and not isinstance(lists, str)
    if not valid or not all(
        isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(n, str) for n in names)
        for names in lists
    ):
        raise ConfigError(
            f"{what} must be a list of lists of task names, such as [[cls, number]], got {lists!r}."
        )


def _check_groups(
    model: MultiTaskModel, schedule: str, groups: Sequence[Sequence[str]], chunks: Mapping[str, int]
) -> None:
    if groups and schedule == "summed":
        raise ConfigError("groups has no effect with schedule='summed', where all heads share one backward.")
    seen: set[str] = set()
    for group in groups:
        if len(group) < 2:
            raise ConfigError(f"groups: {list(group)} is no group; it takes two tasks or more.")
        for name in group:
            if name in seen:
                raise ConfigError(f"groups: {name!r} stands in them twice; a task is in one group.")
            seen.add(name)
            if chunks.get(name, 1) > 1:
                raise ConfigError(f"{name!r} can't be in a group and run in chunks: choose one of these.")
        parents = {model.paths[name][:-1] for name in group}
        if len(parents) > 1:
            raise ConfigError(
                f"groups: {', '.join(group)} are on different nodes of the tree. A group is of tasks whose "
                f"paths differ in the head only."
            )


def _check_chunks(model: MultiTaskModel, schedule: str, chunks: Mapping[str, int]) -> None:
    for name, number in chunks.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"chunks.{name} must be a whole number of at least 1, got {number!r}.")
        if number > 1 and not model.task(name).additive:
            raise ConfigError(
                f"chunks: the loss of {name!r} is not a mean over labels (additive = False), so that of a "
                f"whole is not made of those of its parts. Recompute parts of the head instead."
            )
    several = [name for name, number in chunks.items() if number > 1]
    if several and schedule != "split":
        raise ConfigError(
            f"chunks belongs to schedule='split', where a trunk runs once for all of them; with {schedule!r} "
            f"use more micro-batches."
        )
