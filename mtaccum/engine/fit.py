"""Fit: whether a model is such that its steps can be run as options ask for."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from mtaccum.engine.norms import batch_normalised, check_norms
from mtaccum.engine.options import StepOptions
from mtaccum.errors import ConfigError, listed, unknown_name
from mtaccum.model.tree import MultiTaskModel


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
