"""The state of a training: all that it takes to go on, on as many ranks as one likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mtaccum.parallel import distribute_like
from mtaccum.state import RandomState

if TYPE_CHECKING:
    from mtaccum.training.trainer import Trainer

_PROGRESS = (
    "steps",
    "micro_batches",
    "samples",
    "epoch",
    "samples_in_epoch",
    "best",
    "evaluations_since_best",
    "evaluated_steps",
)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that goes on from here: tensors and plain values. To be called on all ranks."""
    engine = trainer.engine
    return {
        "model": trainer.model.state_dict(),
        "average": None if trainer.average is None else trainer.average.state_dict(),
        "optimizer": _by_number([optimizer.state_dict() for optimizer in engine.optimizers.all]),
        "optimizer_class": engine.optimizers.name,
        "lr_scheduler": _by_number([scheduler.state_dict() for scheduler in engine.lr_schedulers]),
        "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
        "random": trainer.ranks.all_gather_object(RandomState(_generators(trainer)).state_dict()),
        "progress": {name: getattr(trainer, name) for name in _PROGRESS},
    }


def _by_number(states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """One state as it is, several by their numbers; None for none."""
    if len(states) < 2:
        return states[0] if states else None
    return {str(number): state for number, state in enumerate(states)}


def _numbered(state: Any, number: int, several: Sequence[Any]) -> Any:
    return state if len(several) == 1 else state[str(number)]


def _generators(trainer: Trainer) -> list[torch.Generator]:
    """Those from which the loaders draw seeds and orders."""
    loaders = (trainer.loader, trainer.validation)
    generators = [loader.generator for loader in loaders if loader.generator is not None]
    return list({id(generator): generator for generator in generators}.values())


def load_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Go on from what ``state_of`` gave.

    Raises:
        ValueError: another optimizer, or averaged weights on one side only.
        RuntimeError, KeyError: other parameters, as PyTorch says it.
    """
    engine = trainer.engine
    if (trainer.average is None) != (state["average"] is None):
        has = "none" if state["average"] is None else "averaged weights"
        raise ValueError(f"It holds {has}; set trainer.ema_decay as it was.")
    # PyTorch loads another optimizer's state without a word, and fails in the first step
    if (own := engine.optimizers.name) != state["optimizer_class"]:
        raise ValueError(f"It was made with {state['optimizer_class']}, and this is {own}.")
    like = trainer.model.state_dict()
    trainer.model.load_state_dict(
        {n: distribute_like(v, like[n]) if n in like else v for n, v in state["model"].items()}
    )
    if trainer.average is not None:
        trainer.average.load_state_dict(state["average"])
    for number, optimizer in enumerate(engine.optimizers.all):
        saved = _numbered(state["optimizer"], number, engine.optimizers.all)
        optimizer.load_state_dict(_distributed(saved, optimizer))
    if state["lr_scheduler"] is not None:
        for number, scheduler in enumerate(engine.lr_schedulers):
            scheduler.load_state_dict(_numbered(state["lr_scheduler"], number, engine.lr_schedulers))
    if engine.scaler is not None and state["scaler"] is not None:
        engine.scaler.load_state_dict(state["scaler"])
    _restore_random_streams(trainer, state)
    for name in _PROGRESS:
        setattr(trainer, name, state["progress"][name])
    trainer.engine.steps = trainer.steps


def _restore_random_streams(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Let this rank's streams go on; on more ranks than before the others go on with their seeds."""
    rank = trainer.ranks.rank
    if "rng" in state:  # of version 3, which has PyTorch's stream on the CPU alone
        if rank < len(state["rng"]):
            torch.set_rng_state(state["rng"][rank])
    elif rank < len(state["random"]):
        RandomState.of_state_dict(state["random"][rank], _generators(trainer)).restore()


def _distributed(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer, sharded as its parameters are."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    like = dict(zip(indices, held, strict=False))
    state_of_parameters = {
        index: {
            name: distribute_like(v, like[index]) if isinstance(v, Tensor) else v for name, v in entry.items()
        }
        for index, entry in state["state"].items()
    }
    return {**state, "state": state_of_parameters}
