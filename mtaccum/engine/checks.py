"""What an engine refuses to work with, said before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from mtaccum.errors import ConfigError, OptimizerError, listed, warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel import wrapper_of
from mtaccum.torch_internals import has_whole_gradient_hooks


def check_nothing_for_step(**given: Any) -> None:
    """Refuse arguments that only ``step`` heeds, where there is no optimizer to step."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} belongs to step(), but this engine has no optimizer.")


def check_model(model: Any) -> None:
    """Refuse anything but a MultiTaskModel free of parallel wrappers.

    A wrapper would reduce gradients in every backward, of which a step has several.
    """
    if (wrapper := wrapper_of(model)) is not None:
        raise ConfigError(
            f"the model is wrapped by {wrapper}, which reduces gradients in each backward, while a step here "
            f"has several. Give the bare modules to MultiTaskModel: started by torchrun, the engine reduces "
            f"gradients once per step."
        )
    if not isinstance(model, MultiTaskModel):
        raise ConfigError(
            f"the engine needs a MultiTaskModel, got {type(model).__name__}: "
            f"MultiTaskModel(trunk, tasks, inputs=...), not wrapped or compiled (compile=True does that by "
            f"node). For a loop without tasks use split_backward."
        )
    if "forward" in vars(model):
        warn(
            "the model's forward was replaced (by Accelerate with mixed precision, perhaps), but the engine "
            "runs its nodes and doesn't call it. Choose precision= here instead, or enter the autocast "
            "around the engine."
        )


def check_optimizer(model: MultiTaskModel, optimizer: Optimizer) -> None:
    """Refuse an optimizer that lacks a trainable parameter or needs a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"{type(optimizer).__name__}.step needs a closure, which would run the model several times in a "
            f"step. Use an optimizer that steps from gradients."
        )
    accelerated = getattr(optimizer, "gradient_state", None)
    if accelerated is not None and getattr(accelerated, "num_steps", 1) > 1:
        raise OptimizerError(
            f"Accelerate steps this optimizer every {accelerated.num_steps} backwards only, and divides "
            f"losses by that. A window is accumulated already: set gradient_accumulation_steps=1, and give "
            f"larger windows."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for key, name in _learning(model).items() if key not in held]:
        raise OptimizerError(
            f"the optimizer doesn't hold {len(missing)} trainable parameters: "
            f"{listed(missing)}. Build it from model.parameters(), or set "
            f"requires_grad_(False) on what should not be trained."
        )


def _learning(model: MultiTaskModel) -> dict[int, str]:
    """Names of the parameters that can learn, by id."""
    tasks = model.tasks_by_name()
    idle = tuple(f"tasks.{n}." for n, task in tasks.items() if not task.enabled or task.mode == "frozen")
    # a parameter shared with an idle task has a name in each of the places where it is used
    return {
        id(parameter): name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and not name.startswith(idle)
    }


def check_hooks(model: MultiTaskModel) -> None:
    """Refuse parameters with a hook that wants the whole gradient, which here comes in several pieces."""
    for name, parameter in model.named_parameters():
        if has_whole_gradient_hooks(parameter):
            raise OptimizerError(
                f"{name} has a post-accumulate-grad hook (an optimizer step in the backward, say). It would "
                f"run for each task and micro-batch. Use on_gradients, or step the optimizer as usual."
            )
