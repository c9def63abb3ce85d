"""The state of a training: all that it takes to go on, on as many ranks as one likes."""

from __future__ import annotations

from collections.abc import Mapping
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
    optimizer, scheduler = trainer.engine.optimizer, trainer.engine.lr_scheduler
    assert optimizer is not None
    return {
        "model": trainer.model.state_dict(),
        "average": None if trainer.average is None else trainer.average.state_dict(),
        "optimizer": optimizer.state_dict(),
        "optimizer_class": type(optimizer).__name__,
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if trainer.engine.scaler is None else trainer.engine.scaler.state_dict(),
        "random": trainer.ranks.all_gather_object(RandomState(_generators(trainer)).state_dict()),
        "progress": {name: getattr(trainer, name) for name in _PROGRESS},
    }


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
    assert trainer.engine.optimizer is not None
    if (trainer.average is None) != (state["average"] is None):
        has = "none" if state["average"] is None else "averaged weights"
        raise ValueError(f"It holds {has}; set trainer.ema_decay as it was.")
    # PyTorch loads another optimizer's state without a word, and fails in the first step
    if (own := type(trainer.engine.optimizer).__name__) != state["optimizer_class"]:
        raise ValueError(f"It was made with {state['optimizer_class']}, and this is {own}.")
    like = trainer.model.state_dict()
    trainer.model.load_state_dict(
        {n: distribute_like(v, like[n]) if n in like else v for n, v in state["model"].items()}
    )
    if trainer.average is not None:
        trainer.average.load_state_dict(state["average"])
    trainer.engine.optimizer.load_state_dict(_distributed(state["optimizer"], trainer.engine.optimizer))
    if trainer.engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        trainer.engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if trainer.engine.scaler is not None and state["scaler"] is not None:
        trainer.engine.scaler.load_state_dict(state["scaler"])
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
