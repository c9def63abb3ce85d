"""Awkward models, their batches, and the joint reference that all exactness tests compare with.

The reference is written from the definition of a step's gradient and shares no code with the schedules: it
walks the tree by the nodes' own ``sources``, keeps every graph of the window, and runs one backward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mtaccum import Classification, MultiTaskModel, Neck, Regression, Segmentation, Task
from mtaccum.batch import Inputs
from mtaccum.structure import detach

SCHEDULE_NAMES = ("summed", "sequential", "split")


# --- features of every kind -------------------------------------------------------------------------------


@dataclass
class Pyramid:
    """Features that PyTorch's own pytree would take for a leaf."""

    fine: Tensor
    coarse: Tensor
    stride: int = 2
    note: str | None = None


class Pooled(NamedTuple):
    vector: Tensor
    level: int


class AwkwardTrunk(nn.Module):
    """BatchNorm, dropout, an in-place op inside, and features nested in every kind of container.

    (batch, 3, h, w) to maps of 4 channels; one tensor stands in three places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, image: Tensor) -> dict[str, Any]:
        fine = self.dropout(F.relu(self.norm(self.conv(image)), inplace=True))
        coarse = F.avg_pool2d(fine, 2)
        return {
            "pyramid": Pyramid(fine, coarse),
            "pooled": Pooled(fine.mean((2, 3)), 7),
            "list": [coarse, None, (fine, 3)],
            "size": image.shape[-1],
        }


class FeaturePyramid(nn.Module):
    """A neck from the trunk's features to a tuple with a dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.Conv2d(4, 5, 1)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, features: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        pyramid = features["pyramid"]
        up = F.interpolate(features["list"][0], scale_factor=pyramid.stride)
        top = torch.tanh(self.norm(self.lateral(pyramid.fine + up)))
        return top, {"mean": top.mean((2, 3)), "stride": 1}


class Deep(nn.Module):
    """A neck on a neck, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)
        self.dropout = nn.Dropout(0.25)

    def forward(self, features: tuple[Tensor, dict[str, Any]]) -> list[Tensor]:
        return [self.dropout(F.gelu(self.layer(features[1]["mean"])))]


class Both(nn.Module):
    """A head on ("trunk", "fpn"): gets a tuple of both nodes' features."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(9, classes, 3, padding=1)

    def forward(self, features: tuple[Any, Any]) -> Tensor:
        trunk, fpn = features
        return self.conv(torch.cat([trunk["pyramid"].fine, fpn[0]], dim=1))


class Twice(nn.Module):
    """One module used at two scales, so that it gets two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 1, 3, padding=1)
        self.norm = nn.BatchNorm2d(1)

    def forward(self, features: dict[str, Any]) -> Tensor:
        coarse, _, (fine, _) = features["list"]
        return self.norm(self.conv(fine)) + F.interpolate(self.norm(self.conv(coarse)), scale_factor=2)


class OnVector(nn.Module):
    """A layer on the trunk's pooled vector; spectrally normalised or tied where asked for."""

    def __init__(self, out: int, *, spectral: bool = False, tied_to: OnVector | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, out)
        if tied_to is not None:
            self.layer.weight = tied_to.layer.weight
        if spectral:
            parametrizations.spectral_norm(self.layer)

    def forward(self, features: dict[str, Any]) -> Tensor:
        return self.layer(features["pooled"].vector)


class Noisy(nn.Module):
    """Randomness that PyTorch doesn't know of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, features: list[Tensor]) -> Tensor:
        (vector,) = features
        noise = torch.from_numpy(np.random.standard_normal(tuple(vector.shape))).to(vector)
        return self.layer(vector + noise)


class MeanOverMap(nn.Module):
    """A head without parameters: (batch, 5)."""

    def forward(self, features: tuple[Tensor, dict[str, Any]]) -> Tensor:
        return features[1]["mean"]


def awkward_model(seed: int = 0, inputs: Any = "image") -> MultiTaskModel:
    """Every awkward thing in one tree, in float64.

    trunk -- fpn -- deep -- noisy
      |       |----- seg (on the trunk too), bare (no parameters)
      |----- depth (a module used twice), cls (spectral norm), left and right (a tied weight)
    """
    torch.manual_seed(seed)
    left = OnVector(2)
    model = MultiTaskModel(
        AwkwardTrunk(),
        {
            "seg": Segmentation(num_classes=3, head=Both(3), target="seg", on=("trunk", "fpn"), weight=0.7),
            "depth": Regression(head=Twice(), dense=True, criterion="huber", weight=2.0),
            "noisy": Regression(2, head=Noisy(), target="pair", on="deep"),
            "cls": Classification(
                num_classes=3, head=OnVector(3, spectral=True), class_weights=[1.0, 0.5, 3.0], weight=1.3
            ),
            "bare": Regression(5, head=MeanOverMap(), target="five", criterion="mse", on="fpn"),
            "left": Regression(2, head=left, target="pair", criterion="mse"),
            "right": Regression(2, head=OnVector(2, tied_to=left), target="pair", weight=0.1),
        },
        inputs=inputs,
        necks={"deep": Neck(Deep(), on="fpn"), "fpn": Neck(FeaturePyramid())},
    )
    return model.double()


def awkward_batch(samples: int, seed: int = 1) -> dict[str, Tensor]:
    """A batch for ``awkward_model``, float64, with labels missing at random (never all of them)."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, generator=random, dtype=torch.float64)

    def missing(target: Tensor, label: float) -> Tensor:
        gone = torch.rand(target.shape, generator=random) < 0.3
        gone.view(-1)[0] = False
        return torch.where(gone, torch.tensor(label, dtype=target.dtype), target)

    def classes(*shape: int) -> Tensor:
        return torch.randint(0, 3, (samples, *shape), generator=random)

    return {
        "image": normal(3, 8, 8),
        "seg": missing(classes(8, 8), 255),
        "depth": missing(normal(1, 8, 8), float("nan")),
        "cls": missing(classes(), -100),
        "pair": missing(normal(2), float("nan")),
        "five": missing(normal(5), float("nan")),
    }


# --- a plain model, where the number of micro-batches makes no difference ----------------------------------


def plain_model(seed: int = 0, **weights: float) -> MultiTaskModel:
    """A trunk and heads without BatchNorm and dropout, on vectors of 3 numbers; float64."""
    torch.manual_seed(seed)
    model = MultiTaskModel(
        nn.Sequential(nn.Linear(3, 8), nn.Tanh()),
        {
            "cls": Classification(num_classes=4, head=nn.Linear(8, 4), class_weights=[1.0, 2.0, 0.25, 4.0]),
            "value": Regression(2, head=nn.Linear(8, 2), target="value", criterion="mse", weight=0.3),
            "other": Regression(
                1, head=nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1)), target="other"
            ),
        },
        inputs="x",
    ).double()
    for name, weight in weights.items():
        model.task(name).weight = weight
    return model


def plain_batch(samples: int, seed: int = 1, *, missing: float = 0.0) -> dict[str, Tensor]:
    """A batch for ``plain_model``; with ``missing`` more labels lack towards the batch's end."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, generator=random, dtype=torch.float64)

    batch = {
        "x": normal(3),
        "cls": torch.randint(0, 4, (samples,), generator=random),
        "value": normal(2),
        "other": normal(1),
    }
    late = torch.linspace(0, 2 * missing, samples)
    for key, label in (("cls", -100), ("value", float("nan")), ("other", float("nan"))):
        gone = torch.rand(batch[key].shape, generator=random) < late.reshape(
            -1, *[1] * (batch[key].dim() - 1)
        )
        batch[key][gone] = label
    return batch


class Squared(Task):
    """The mean square of what the head gives, over the samples; the simplest task there is."""

    def __init__(self, head: nn.Module, target: str | None = None, **settings: Any) -> None:
        super().__init__(head, target, **settings)

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return prediction.pow(2).mean()


class Failing(nn.Module):
    """A head that raises while ``broken`` is set, after having used its layer."""

    def __init__(self, layer: nn.Module, error: Exception) -> None:
        super().__init__()
        self.layer = layer
        self.error = error
        self.broken = True

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.layer(features)
        if self.broken:
            raise self.error
        return output


# --- the joint reference ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What one window does, by the definition: gradients (None where none), losses, buffers after it."""

    gradients: Mapping[str, Tensor | None]
    losses: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def joint_reference(model: MultiTaskModel, window: Sequence[Any]) -> Reference:
    """Forward of all micro-batches, sum over tasks of weight * (sum of label losses) / (their number), and
    one backward, on a copy of the model. Draws random numbers as one pass of each node does, depth first."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    tasks = {name: task for name, task in model.tasks_by_name().items() if _runs(task)}
    counts = {name: [float(task.count(batch)) for batch in window] for name, task in tasks.items()}
    _correct_momentum(model, counts)
    sums: dict[str, Tensor] = {}
    for index, batch in enumerate(window):
        features = {"inputs": model.inputs(batch)}
        for name in depth_first(model, [name for name in tasks if counts[name][index]]):
            given, task = _ask(model, name, features), _running(tasks[name])
            loss = _total(task.loss(task(given, batch), batch)) * counts[name][index]
            sums[name] = sums[name] + loss if name in sums else loss
    means = {name: total / sum(counts[name]) for name, total in sums.items()}
    joint = sum((tasks[name].weight * mean for name, mean in means.items()), start=torch.zeros(()))
    if joint.requires_grad:
        joint.backward()
    return Reference(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: mean.detach() for name, mean in means.items()},
        dict(model.named_buffers()),
    )


def _runs(task: Task) -> bool:
    return task.mode != "off" and task.weight > 0


def _running(module: nn.Module) -> Any:
    """What of a node runs: a throwaway copy, if the node is not to learn and its buffers not to move."""
    parameters = list(module.parameters())
    idle = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
    if idle or getattr(module, "mode", "") == "frozen":
        return copy.deepcopy(module).requires_grad_(False)
    return module


def depth_first(model: MultiTaskModel, tasks: Sequence[str]) -> list[str]:
    """Tasks in the order in which a walk down the tree meets them, child by child in the tasks' order."""
    met: dict[tuple[str, ...], int] = {}
    for name in tasks:
        for depth in range(1, len(model.paths[name]) + 1):
            met.setdefault(model.paths[name][:depth], len(met))
    return sorted(
        tasks, key=lambda name: [met[model.paths[name][: d + 1]] for d in range(len(model.paths[name]))]
    )


def _total(loss: Any) -> Tensor:
    """A loss of named terms is their sum; a plain number is a constant."""
    if isinstance(loss, Mapping):
        return sum((_total(term) for term in loss.values()), start=torch.zeros(()))
    return torch.as_tensor(loss).reshape(())


def _correct_momentum(model: MultiTaskModel, counts: Mapping[str, Sequence[float]]) -> None:
    """Running statistics move per window as far as they do per batch without accumulation."""
    for node in ("trunk", *model.necks, *model.tasks):
        below = [n for name, n in counts.items() if node in model.paths[name]]
        passes = sum(any(micro_batch) for micro_batch in zip(*below, strict=True))
        if passes > 1 and (node != "trunk" or model.trunk is not None):
            for layer in model.node(node).modules():
                if isinstance(getattr(layer, "momentum", None), float):
                    layer.momentum = 1 - (1 - layer.momentum) ** (1 / passes)


def _ask(model: MultiTaskModel, name: str, features: dict[str, Any]) -> Any:
    """What a node gets; runs each node above at most once per micro-batch."""
    for source in sorted(model.sources(name), key=lambda node: len(model.paths[node])):
        if source not in features:
            module = model.trunk if source == "trunk" else model.necks[source]
            features[source] = _call(_running(module), _ask(model, source, features))
    given = [features[source] for source in model.sources(name)]
    if getattr(model.node(name), "mode", "") == "detached":  # from nodes; inputs that want a gradient get it
        given = [f if s == "inputs" else detach(f) for s, f in zip(model.sources(name), given, strict=True)]
    return given[0] if len(given) == 1 else tuple(given)


def _call(module: nn.Module, given: Any) -> Any:
    return module(**given) if isinstance(given, Inputs) else module(given)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of a module's gradients by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


def assert_close_gradients(model: MultiTaskModel, reference: Reference, tolerance: float) -> None:
    """Gradients equal in the measure of the contract.

    Per node ||g - reference|| / ||reference|| over all its parameters is at most the tolerance; per tensor
    the absolute error is at most tolerance * the node's norm (a bias in front of BatchNorm has gradient 0,
    where a relative error means nothing); None where the reference has None.
    """
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert own.keys() == reference.gradients.keys()
    none = {name for name, gradient in own.items() if gradient is None}
    assert none == {name for name, gradient in reference.gradients.items() if gradient is None}
    for node, names in _by_node(name for name in own if name not in none):
        errors = [(own[name] - reference.gradients[name]).norm().item() for name in names]
        norm = torch.stack([reference.gradients[name].norm() for name in names]).norm().item()
        total = sum(error**2 for error in errors) ** 0.5
        assert total <= tolerance * norm, f"{node}: relative error {total / norm if norm else total:.2e}"
        for name in names:
            worst = (own[name] - reference.gradients[name]).abs().max().item()
            assert worst <= tolerance * norm, (
                f"{name}: absolute error {worst:.2e}, norm of its node {norm:.2e}"
            )


def _by_node(names: Iterator[str]) -> list[tuple[str, list[str]]]:
    nodes: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        nodes.setdefault(parts[0] if parts[0] == "trunk" else ".".join(parts[:2]), []).append(name)
    return list(nodes.items())


def assert_equal_states(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Two state dicts, or buffers by name, bit for bit."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


class RandomState:
    """The state of every generator that a forward may draw from, for comparisons."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        _, self.numpy, self.position, *_ = np.random.get_state()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and torch.equal(self.torch, other.torch)
            and np.array_equal(self.numpy, other.numpy)
            and self.position == other.position
        )

    __hash__ = None  # type: ignore[assignment]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
