"""The on-ramp: one call on the user's own modules, without tasks, engine or configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mtaccum.engine.recompute import recomputed
from mtaccum.engine.result import sum_of_terms
from mtaccum.engine.schedules import Backward, Features, Node, split
from mtaccum.errors import ConfigError, unknown_name
from mtaccum.model.tree import named_errors
from mtaccum.structure import aliased
from mtaccum.tasks.base import check_weight

_TRUNK = "features"


def split_backward(
    features: Any,
    losses: Mapping[str, Callable[[Any], Tensor]],
    *,
    weights: Mapping[str, float] | None = None,
    recompute: bool = False,
    backward: Backward = Tensor.backward,
) -> dict[str, Tensor]:
    """Add the gradient of the weighted sum of all losses to ``.grad``, one head's graph at a time.

    The same gradients as ``sum(weight * loss).backward()``, in the memory of the trunk plus one head and
    in one trunk pass: each loss runs on detached features and finishes its backward before the next one
    starts; then one backward goes through the trunk, from the sum of the gradients at the features.

        features = net.backbone(image)
        losses = split_backward(features, {
            "seg": lambda f: F.cross_entropy(net.seg(f), y_seg),
            "depth": lambda f: F.l1_loss(net.depth(f), y_depth),
        })
        optimizer.step()

    Args:
        features: what the trunk returned, any nest of tensors; or a function without arguments that runs
            the trunk.
        losses: for each task a function of the features (use its argument, not the variable outside) that
            runs the head and returns the loss, a 0-d tensor or a dict of terms whose sum it is. None: there
            is no label in this batch, so nothing is learned from it.
        weights: factor of each loss, by task; 1 where not given. A loss of weight 0 is not run.
        recompute: run the trunk without keeping its graph, and once more for its backward (Chen et al.,
            Training Deep Nets with Sublinear Memory Cost, 2016); needs
            ``features`` as a function. Dropout and running statistics are as if it ran once; this holds
            for the buffers of modules that are called (not for those whose methods are called instead).
        backward: called once with each weighted loss instead of ``loss.backward()``.

    Returns:
        The losses by task: detached, 0-d, before weighting; without those that were None.

    Raises:
        ConfigError: no losses, weights that are unknown, negative or not finite, or ``recompute`` without
            a function.
        TaskError: a head or loss failed; InplaceError: it writes into the shared features.
        FeatureError: features of a type that can't be taken apart.
    """
    if recompute and not callable(features):
        raise ConfigError(
            "recompute=True needs a function that runs the trunk: "
            "split_backward(lambda: net.backbone(x), ...)."
        )
    if not callable(features) and not torch.is_grad_enabled():
        raise ConfigError("gradients are switched off (torch.no_grad); call split_backward outside of that.")
    done: dict[str, Tensor] = {}
    leaves = _leaves(losses, weights, done, takes_features=True)
    if not leaves:  # all weights are 0
        return done
    trunk = recomputed(features, None, _TRUNK) if recompute else features
    run: Callable[[Features], Any] = (lambda _: trunk()) if callable(trunk) else (lambda _: trunk)
    split([Node(_TRUNK, run, leaves)], {}, backward)
    return done


def sequential_backward(
    losses: Mapping[str, Callable[[], Tensor]],
    *,
    weights: Mapping[str, float] | None = None,
    backward: Backward = Tensor.backward,
) -> dict[str, Tensor]:
    """Add the gradient of the weighted sum of all losses to ``.grad``, one loss after the other.

    For independent models: each function runs its own model, and its graph is freed before the next one
    runs. A trunk that several of them run does so several times, and so do its dropout and its running
    statistics; ``split_backward`` is for that.

        losses = sequential_backward({
            "a": lambda: loss1(model1(x), y),
            "b": lambda: loss2(model2(x), y),
        })

    Args, returns and raises: as in ``split_backward``; the functions take no argument.
    """
    done: dict[str, Tensor] = {}
    # no node is shared, so the walk is the same in split and sequential
    split(_leaves(losses, weights, done, takes_features=False), {}, backward)
    return done


def _leaves(
    losses: Mapping[str, Callable[..., Any]],
    weights: Mapping[str, float] | None,
    done: dict[str, Tensor],
    takes_features: bool,
) -> tuple[Node, ...]:
    if not isinstance(losses, Mapping) or not losses:
        raise ConfigError('losses must be a dict with at least one task: {"seg": lambda f: ...}.')
    for name, function in losses.items():
        if not callable(function):
            raise ConfigError(
                f"the loss of {name!r} is a {type(function).__name__}; it must be a function, so that it "
                f"runs when its turn comes: lambda{' f' if takes_features else ''}: ..."
            )
    weights = dict(weights or {})
    for name, weight in weights.items():
        if name not in losses:
            raise ConfigError(unknown_name("task in weights", name, losses))
        check_weight(f"the weight of {name!r}", weight)

    def leaf(name: str) -> Node:
        function, weight = losses[name], weights.get(name, 1.0)

        def run(above: Features) -> Tensor:
            with named_errors(lambda: f"task {name!r}"):
                given = function(aliased(above[_TRUNK])) if takes_features else function()
                if given is None:
                    return torch.zeros(())  # a constant: it has no backward
                loss = sum_of_terms(given)
            done[name] = loss.detach()
            return loss * weight

        return Node(name, run)

    return tuple(leaf(name) for name in losses if weights.get(name, 1.0) > 0)
