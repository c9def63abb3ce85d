"""MultiTaskModel: a trunk, necks and tasks as a tree of the user's own modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mtaccum.batch import Field, Inputs, SeveralInputs, call, check_field, get_field, own_view
from mtaccum.errors import ConfigError, InplaceError, TaskError, unknown_name
from mtaccum.model.paths import ROOT, TRUNK, paths_of
from mtaccum.structure import aliased, describe

if TYPE_CHECKING:  # tasks use the heads of this package; so this package only names their type
    from mtaccum.tasks.base import Task

Tree = dict[str, Any]  # nodes by name, each with the tree of its children
InputsFrom = Field | tuple[Field, ...] | list[Field]


class Neck(nn.Module):
    """A module shared by some tasks, between the trunk and their heads.

    Args:
        module: your module; it gets the features of ``on``.
        on: name of the trunk or neck whose features it gets, or a tuple of names on one path of the
            tree, for a tuple of their features.
    """

    def __init__(self, module: nn.Module, on: str | tuple[str, ...] = TRUNK) -> None:
        super().__init__()
        self.module = module
        self.on = (on,) if isinstance(on, str) else tuple(on)

    def forward(self, features: Any) -> Any:
        return call(self.module, features)


class MultiTaskModel(nn.Module):
    """Your modules, and which of them feeds which.

    Nodes are your own modules, not copies: their state dicts, export and inference stay as they were.

    Args:
        trunk: the module that all tasks share; None: each head gets the inputs itself, and the tasks are
            independent models.
        tasks: tasks by name.
        inputs: what the trunk gets of a batch: a key, an index, ``mtaccum.path(...)`` or a function of the
            batch (one positional argument); several keys (keyword arguments of these names) or several of
            any of these (positional arguments, in their order).
        necks: necks by name.

    Raises:
        ConfigError: no task; a name that is taken twice or can't be used; ``on`` names a node that
            doesn't exist, nodes that aren't on one path, or a circle.
    """

    def __init__(
        self,
        trunk: nn.Module | None,
        tasks: Mapping[str, Task],
        *,
        inputs: InputsFrom,
        necks: Mapping[str, Neck] | None = None,
    ) -> None:
        super().__init__()
        if not tasks:
            raise ConfigError("a MultiTaskModel needs at least one task; tasks is empty.")
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        check_field("inputs", inputs, several=True)
        necks = necks or {}
        _check_names(trunk, tasks, necks)
        self.trunk = trunk
        self.necks = nn.ModuleDict(dict(necks))
        self.tasks = nn.ModuleDict(dict(tasks))
        self._inputs_from = inputs
        nodes = {**self.necks, **self.tasks}
        on = {name: cast("Neck | Task", node).on for name, node in nodes.items()}
        if trunk is None:
            on = {name: tuple(ROOT if n == TRUNK else n for n in given) for name, given in on.items()}
        self._on = {TRUNK: (ROOT,), **on}
        # for each node the names of the nodes from the trunk to it, itself included
        self.paths = paths_of(trunk is not None, on, set(self.necks))
        used = {node for task in self.tasks for node in self.paths[task]}
        if unused := [name for name in self.necks if name not in used]:
            warnings.warn(
                f"the neck {unused[0]!r} feeds no task, so it is never run. Put a task on it, or drop it.",
                stacklevel=2,
            )

    def task(self, name: str) -> Task:
        """The task of that name, or ConfigError."""
        if name not in self.tasks:
            raise ConfigError(unknown_name("task", name, self.tasks))
        return cast("Task", self.tasks[name])

    def tasks_by_name(self) -> dict[str, Task]:
        """All tasks, in the order they were given."""
        return {name: cast("Task", task) for name, task in self.tasks.items()}

    @property
    def reads_fields(self) -> bool:
        """Whether the inputs are entries of the batch, so that a batch can't be a bare tensor."""
        return not callable(self._inputs_from)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if there is none."""
        first = next(chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def node(self, name: str) -> nn.Module:
        """The trunk, neck or task of that name."""
        if name == TRUNK and self.trunk is not None:
            return self.trunk
        return self.necks[name] if name in self.necks else self.task(name)

    def own_modules(self) -> dict[str, nn.Module]:
        """The user's own module of each node: the trunk, what a neck wraps, a task's head."""
        trunk = {} if self.trunk is None else {TRUNK: self.trunk}
        necks = {name: cast(Neck, neck).module for name, neck in self.necks.items()}
        return {**trunk, **necks, **{name: task.head for name, task in self.tasks_by_name().items()}}

    def is_frozen(self, name: str) -> bool:
        """Whether a node stays as it is: a task of mode ``frozen``, or parameters of which none learns."""
        if name in self.tasks and self.task(name).mode == "frozen":
            return True
        parameters = list(self.node(name).parameters())
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    def frozen_modules(self) -> list[nn.Module]:
        """The modules of frozen nodes that no learning node shares: steps leave their buffers alone."""
        nodes = {name: self.node(name) for name in self.own_modules()}
        frozen = {name for name in nodes if self.is_frozen(name)}
        shared = {part for name in nodes.keys() - frozen for part in nodes[name].modules()} if frozen else ()
        return [part for name in frozen for part in nodes[name].modules() if part not in shared]

    def prefix(self, node: str) -> str:
        """What the names of a node's parameters in the model begin with: ``tasks.seg.``."""
        return "trunk." if node == TRUNK else f"{'tasks' if node in self.tasks else 'necks'}.{node}."

    def inputs(self, batch: Any) -> Any:
        """What the trunk gets of a batch."""
        source = self._inputs_from
        if callable(source):
            return source(own_view(batch))
        if not isinstance(source, tuple):
            return get_field(batch, source)
        named = {field: get_field(batch, field) for field in source if isinstance(field, str)}
        if len(named) == len(source):
            return Inputs(named)
        return SeveralInputs(get_field(batch, field) for field in source)

    def sources(self, name: str) -> tuple[str, ...]:
        """Names of the nodes whose features this node gets; ``inputs`` for what comes from the batch."""
        return self._on[name]

    def gather(self, name: str, features: Mapping[str, Any]) -> Any:
        """What node ``name`` gets, out of all features by node: one nest, or a tuple of them.

        The containers are its own: a head that pops an entry from a dict must not take it from others. So are
        the tensors, as places for hooks: one that a head puts on its features must not fire for others.
        """
        parts = tuple(aliased(features[source]) for source in self.sources(name))
        return parts[0] if len(parts) == 1 else parts

    def run(self, name: str, features: Mapping[str, Any], batch: Any) -> Any:
        """Forward of one node: the features of a trunk or neck, the prediction of a task.

        Raises:
            TaskError: it failed; names the node and what it was given.
        """
        given, module = self.gather(name, features), self.node(name)
        with named_errors(lambda: f"{self.describe_node(name)}, given {describe(given)}"):
            return module(given, own_view(batch)) if name in self.tasks else call(module, given)

    def describe_node(self, name: str) -> str:
        """``task 'seg' (head DenseHead on 'trunk')``, for error messages."""
        on = " and ".join(map(repr, self.sources(name)))
        if name in self.tasks:
            return f"task {name!r} (head {type(self.task(name).head).__name__} on {on})"
        module = self.node(name)
        module = module.module if isinstance(module, Neck) else module
        return f"{'trunk' if name == TRUNK else f'neck {name!r}'} ({type(module).__name__} on {on})"

    def tree(self, tasks: Iterable[str]) -> Tree:
        """The part of the tree that leads to ``tasks``, as a dict of dicts in depth-first order."""
        tree: Tree = {}
        for task in tasks:
            node = tree
            for name in self.paths[task]:
                node = node.setdefault(name, {})
        return tree

    def tasks_below(self, node: str) -> list[str]:
        """Names of the tasks whose path leads through a node; the task itself, if it is one."""
        return [name for name in self.tasks if node in self.paths[name]]

    def taught_by(self, tasks: Iterable[str]) -> list[str]:
        """Names of the nodes that learn from these tasks, as their modes say."""
        modes = {name: self.task(name).mode for name in tasks}
        return [
            node
            for node in self.own_modules()
            if any(
                mode == "train" or (mode == "detached" if node == name else mode == "frozen")
                for name, mode in modes.items()
                if node in self.paths[name]
            )
        ]

    def enabled_tasks(self) -> list[str]:
        """Names of the tasks that training runs."""
        return [name for name in self.tasks if self.task(name).enabled]

    def forward(self, batch: Any, tasks: Iterable[str] | None = None) -> dict[str, Any]:
        """Predictions by task.

        Args:
            batch: needs to hold the inputs only.
            tasks: which tasks; None: all that are enabled.
        """
        chosen = self.enabled_tasks() if tasks is None else [name for name in tasks if self.task(name)]
        return dict(self._predictions(self.tree(chosen), {ROOT: self.inputs(batch)}, batch))

    def _predictions(self, tree: Tree, features: Mapping[str, Any], batch: Any) -> Iterator[tuple[str, Any]]:
        for name, children in tree.items():
            output = self.run(name, features, batch)
            if name in self.tasks:
                yield name, output
            yield from self._predictions(children, {**features, name: output}, batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no graph; afterwards each module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def named_errors(where: Callable[[], str]) -> Iterator[None]:
    """Say in which node an error happened. Running out of memory keeps its type, so that callers can
    react to it."""
    try:
        yield
    except (InplaceError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: " if isinstance(error, LookupError | AssertionError) else ""
        raise TaskError(f"{where()}: {kind}{error}") from error


def _check_names(trunk: nn.Module | None, tasks: Mapping[str, Task], necks: Mapping[str, Neck]) -> None:
    """Refuse nodes that are no tasks, necks or modules, and names that can't be used."""
    if trunk is not None and not isinstance(trunk, nn.Module):
        raise ConfigError(f"the trunk is a {type(trunk).__name__}; it must be a torch.nn.Module or None.")
    for name, task in tasks.items():
        if not (isinstance(task, nn.Module) and hasattr(task, "loss") and hasattr(task, "count")):
            raise ConfigError(f"task {name!r} is a {type(task).__name__}; it must be a mtaccum.Task.")
    for name, neck in necks.items():
        if not isinstance(neck, Neck):
            raise ConfigError(f"neck {name!r} is a {type(neck).__name__}; wrap it: Neck(module, on=...).")
    for name in (*tasks, *necks):
        if name in (TRUNK, ROOT):
            raise ConfigError(f"a node can't be called {name!r}: that name has a meaning of its own.")
        if not _is_word(name):
            raise ConfigError(
                f"a node can't be called {name!r}: use a word without dots and slashes that isn't an "
                f"attribute of torch.nn.ModuleDict."
            )
    if twice := set(tasks) & set(necks):
        raise ConfigError(f"two nodes are called {min(twice)!r}, a task and a neck; rename one of them.")


def _is_word(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and not set(name) & set("./") and not hasattr(_DICT, name)


_DICT = nn.ModuleDict()
