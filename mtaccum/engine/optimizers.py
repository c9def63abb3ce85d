"""Optimizers: one or several that step together, and what one that fails in a step leaves behind.

A step is done or it isn't. An optimizer that raises before it has written leaves all as it was, but for
entries of its state that it may have made; these go. One that raises while it writes can't be undone without
a second copy of parameters and state. Then it is said which groups have moved, and further steps are refused
until a state is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mtaccum.engine.checks import check_held, check_steppable
from mtaccum.engine.precision import Precision
from mtaccum.errors import ConfigError, OptimizerError, first_line
from mtaccum.model.tree import MultiTaskModel
from mtaccum.torch_internals import versions_of


class Optimizers:
    """Those that an engine steps, each once per step.

    Args:
        given: one, several, or None for no one.

    Raises:
        ConfigError: something that is no optimizer.
        OptimizerError: a parameter that two of them hold.
    """

    def __init__(self, given: Optimizer | Sequence[Optimizer] | None) -> None:
        several = given if isinstance(given, list | tuple) else () if given is None else (given,)
        self.all: tuple[Optimizer, ...] = tuple(several)
        for optimizer in self.all:
            if not all(hasattr(optimizer, name) for name in ("step", "param_groups")):
                raise ConfigError(
                    f"optimizer must be a torch.optim.Optimizer, several in a list, or None; got "
                    f"{type(optimizer).__name__}."
                )
        held = [id(parameter) for optimizer in self.all for parameter in held_by(optimizer)]
        if len(set(held)) < len(held):
            raise OptimizerError("two optimizers hold the same parameter, which would move twice in a step.")
        self._torn: str | None = None
        for optimizer in self.all:
            if isinstance(wrapped := _wrapped_by(optimizer), Optimizer):
                wrapped.register_load_state_dict_post_hook(self._loaded)

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def name(self) -> str:
        """``AdamW``, or ``Muon, AdamW``."""
        return ", ".join(type(optimizer).__name__ for optimizer in self.all)

    def check(self, model: MultiTaskModel) -> None:
        """Refuse those that a step can't drive, and all if they lack a parameter which can learn.

        Raises:
            OptimizerError: says which.
        """
        for optimizer in self.all:
            check_steppable(optimizer)
        check_held(model, self.held())

    def held(self) -> list[nn.Parameter]:
        """All their parameters."""
        return [parameter for optimizer in self.all for parameter in held_by(optimizer)]

    def refuse_torn(self) -> None:
        """Refuse to go on from half a step.

        Raises:
            OptimizerError: an optimizer failed while it wrote, and no state was loaded since.
        """
        if self._torn is not None:
            raise OptimizerError(self._torn)

    def unscale(self, precision: Precision) -> None:
        """Gradients as they would be without scaling."""
        for optimizer in self.all:
            precision.unscale(optimizer)

    def step(self, precision: Precision) -> None:
        """One step of each.

        Raises:
            OptimizerError: one failed when something was written already; names the groups that moved. What
                failed before that is raised as it is, and all is as it was.
        """
        before = [_State(optimizer) for optimizer in self.all]
        try:
            for optimizer in self.all:
                precision.step(optimizer)
        except BaseException as error:
            moved = [words for state in before if (words := state.moved())]
            for state in before:
                state.drop_new_entries()
            if not moved:
                raise
            self._torn = (
                f"an optimizer failed while it wrote ({type(error).__name__}: {first_line(error)}), and that "
                f"can't be undone: {'; '.join(moved)}. Load a state into the model and the optimizer "
                f"(load_state_dict) before the next step."
            )
            if not isinstance(error, Exception):
                raise  # an interrupt stays one
            raise OptimizerError(self._torn) from error

    def _loaded(self, _: Optimizer) -> None:
        self._torn = None


def _wrapped_by(optimizer: Any) -> Any:
    """The optimizer inside of another library's, as Accelerate has it."""
    return getattr(optimizer, "optimizer", optimizer)


def held_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _State:
    """What an optimizer may change in a step, as it was before: which versions its tensors had."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._of_optimizer = getattr(optimizer, "state", {})
        self._entries = {id(parameter): dict(entry) for parameter, entry in self._of_optimizer.items()}
        self._tensors = [list(self._tensors_of(group["params"])) for group in optimizer.param_groups]
        self._versions = [versions_of(tensors) for tensors in self._tensors]

    def _tensors_of(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        for parameter in parameters:
            yield parameter
            if (entry := self._entries.get(id(parameter))) is not None:
                yield from (value for value in entry.values() if isinstance(value, Tensor))

    def moved(self) -> str:
        """The groups of which something has moved, in words; empty if none has."""
        name, groups = type(self.optimizer).__name__, self.optimizer.param_groups
        pairs = zip(self._tensors, self._versions, strict=True)
        moved = [str(number) for number, (now, before) in enumerate(pairs) if versions_of(now) != before]
        if moved:
            return f"group {', '.join(moved)} of the {len(groups)} of {name} has moved"
        bases = (base for base in type(_wrapped_by(self.optimizer)).__mro__ if base is not Optimizer)
        known = any(base.__module__.startswith("torch.optim") for base in bases)
        return "" if known else f"{name} may have moved"  # by writing into .data, which PyTorch doesn't count

    def drop_new_entries(self) -> None:
        """Take away what the step has put into the state, and put back numbers."""
        for parameter in list(self._of_optimizer):
            if (before := self._entries.get(id(parameter))) is None:
                del self._of_optimizer[parameter]
                continue
            entry = self._of_optimizer[parameter]
            for key in [key for key in entry if key not in before]:
                del entry[key]
            entry.update(before)
