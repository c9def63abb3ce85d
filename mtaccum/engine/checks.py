"""What an engine refuses before anything runs: models, optimizers, and options that don't fit a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from mtaccum.engine.norms import batch_normalised, check_norms
from mtaccum.engine.options import StepOptions
from mtaccum.errors import ConfigError, OptimizerError, listed, unknown_name, warn
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel import wrapper_of
from mtaccum.torch_internals import has_whole_gradient_hooks


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
    if lazy := [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ConfigError(
            f"lazy modules have no shapes yet: {listed(lazy)}. Run a batch through the model "
            f"first: model(batch)."
        )
    if "forward" in vars(model):
        warn(
            "the model's forward was replaced (by Accelerate with mixed precision, perhaps), but the engine "
            "runs its nodes and doesn't call it. Choose precision= here instead, or enter the autocast "
            "around the engine."
        )


def check_steppable(optimizer: Optimizer) -> None:
    """Refuse an optimizer that a step with one gradient can't drive."""
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


def check_held(model: MultiTaskModel, held: Iterable[nn.Parameter]) -> None:
    """Refuse optimizers that lack a parameter which can learn."""
    known = {id(parameter) for parameter in held}
    if missing := [name for key, name in _learning(model).items() if key not in known]:
        raise OptimizerError(
            f"the optimizer doesn't hold {len(missing)} trainable parameters: "
            f"{listed(missing)}. Build it from model.parameters(), or set "
            f"requires_grad_(False) on what should not be trained."
        )


def _learning(model: MultiTaskModel) -> dict[int, str]:
    """Names of the parameters that can learn, by id."""
    taught = tuple(map(model.prefix, model.taught_by(model.enabled_tasks())))
    # a parameter shared with an idle task has a name in each of the places where it is used
    return {
        id(parameter): name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and name.startswith(taught)
    }


def check_hooks(model: MultiTaskModel) -> None:
    """Refuse parameters with a hook that wants the whole gradient, which here comes in several pieces."""
    for name, parameter in model.named_parameters():
        if has_whole_gradient_hooks(parameter):
            raise OptimizerError(
                f"{name} has a post-accumulate-grad hook (an optimizer step in the backward, say). It would "
                f"run for each task and micro-batch. Use on_gradients, or step the optimizer as usual."
            )


# --- whether a model is such that its steps can be run as options ask for ---


def check_fit(model: MultiTaskModel, options: StepOptions, scaler: Any = None) -> None:
    """Refuse options that a model can't be trained with."""
    for name in (*chain.from_iterable(options.head_groups), *options.chunks):
        if name not in model.tasks:
            raise ConfigError(unknown_name("task in head_groups or chunks:", name, model.tasks))
    _check_precision(model, options.precision, scaler)
    check_norms(model, options.batchnorm)
    _check_offload(model, options.offload)
    for group in options.head_groups:
        if len({model.paths[name][:-1] for name in group}) > 1:
            raise ConfigError(
                f"head_groups: {', '.join(group)} are on different nodes of the tree. A head group is of "
                f"tasks whose paths differ in the head only."
            )
    for name in options.chunked:
        if not model.task(name).additive:
            raise ConfigError(
                f"chunks: the loss of {name!r} is not a mean over labels (additive = False), so that of a "
                f"whole is not made of those of its chunks. Recompute segments of the head instead."
            )
    check_coupling(model, options)


def check_coupling(model: MultiTaskModel, options: StepOptions) -> None:
    """Refuse chunks of heads that normalise by what they see; it may change between steps."""
    for name in () if options.batchnorm == "freeze" else options.chunked:
        if layers := batch_normalised(model.task(name).head, prefix=name):
            raise ConfigError(
                f"chunks: {name!r} can't take its micro-batch in chunks, since {layers[0]} normalises by "
                f"what it sees. Use batchnorm='freeze', a layer that doesn't couple samples (GroupNorm), "
                f"or recompute segments of the head."
            )


def _check_precision(model: MultiTaskModel, precision: str, scaler: Any) -> None:
    """Refuse to cast what autocast leaves alone, and to scale what PyTorch can't unscale."""
    types = {parameter.dtype for parameter in model.parameters()}
    if precision != "fp32" and types == {torch.float64}:
        raise ConfigError(
            f"precision={precision!r} has no effect: autocast leaves parameters in float64 alone. Use "
            f"model.float(), or precision='fp32'."
        )
    half = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if scaler is not None and half:
        raise ConfigError(
            f"{listed(half)}: parameters in float16 can't be trained with a scaler. Keep them in float32 "
            f"(model.float()); precision='fp16' casts where that is safe."
        )


def _check_offload(model: MultiTaskModel, offload: bool) -> None:
    """Refuse to move saved tensors off a device that they can't leave."""
    if offload and model.device.type != "cuda":
        raise ConfigError(
            f"offload keeps the saved activations of a CUDA device in the host's memory, but the model is on "
            f"{model.device}. Recompute segments instead: recompute=[...]."
        )
