"""Steps on several ranks, to be compared with one step of one process on all their micro-batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from helpers import Reference, joint_reference
from torch import Tensor, nn

from mtaccum import Classification, Engine, MultiTaskModel, Neck, Regression, Segmentation, StepResult, Task
from mtaccum.parallel import current_ranks, full_tensor, shard

KINDS = ("ddp", "fsdp", "plain")
UNSHARDED = ("ddp", "plain")  # of which each rank holds all parameters

Build = Callable[[], MultiTaskModel]
Windows = Sequence[list[Any]]  # one for each rank


# --- a tree with all that may go wrong between ranks ---------------------------------------------------


class Maps(nn.Module):
    """A trunk: maps for all heads, a vector that one head reads, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.side = nn.Linear(3, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        maps = torch.tanh(self.norm(self.conv(image)))
        return {"maps": maps, "side": self.side(image.mean((2, 3)))}


class Pyramid(nn.Module):
    """A neck: maps again."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.Conv2d(4, 5, 1)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return F.gelu(self.norm(self.lateral(features["maps"])))


class Mean(nn.Module):
    """A neck on a neck, or a head without parameters: (batch, channels)."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.mean((2, 3))


class On(nn.Module):
    """A head on one of the trunk's features, tied to another one where asked for."""

    def __init__(self, feature: str, size: int, out: int, tied_to: On | None = None) -> None:
        super().__init__()
        self.feature, self.layer = feature, nn.Linear(size, out)
        if tied_to is not None:
            self.layer.weight = tied_to.layer.weight

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        vector = features[self.feature]
        return self.layer(vector if vector.dim() == 2 else vector.mean((2, 3)))


class Both(nn.Module):
    """A head on the trunk and on a neck."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(9, 3, 1)

    def forward(self, features: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return self.conv(torch.cat([features[0]["maps"], features[1]], dim=1))


class InTerms(Task):
    """A loss of two terms; the second one only where the batch asks for it."""

    def loss(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
        known = ~batch[self.target].isnan()
        error = torch.where(known, prediction - batch[self.target].nan_to_num(), 0.0)
        terms = {"square": error.square().sum() / known.sum()}
        if batch.get("rough"):
            terms["rough"] = error.abs().sum() / known.sum()
        return terms

    def count(self, batch: Any) -> Any:
        return (~batch[self.target].isnan()).sum()


def tree(tied: bool = False, seed: int = 0) -> MultiTaskModel:
    """A tree in float64 that draws no random numbers.

    trunk -- fpn -- vector -- bare (no parameters)
      |       |-- seg (on the trunk too)
      |-- cls (class weights), side (a feature of its own), terms (a loss of terms)
      |-- aside (detached), again (on the maps; tied to ``terms`` if asked for)
    """
    torch.manual_seed(seed)
    terms = On("maps", 4, 2)
    model = MultiTaskModel(
        Maps(),
        {
            "seg": Segmentation(num_classes=3, head=Both(), target="seg", on=("trunk", "fpn"), weight=0.7),
            "cls": Classification(3, head=On("maps", 4, 3), target="cls", class_weights=[1.0, 0.5, 3.0]),
            "bare": Regression(5, head=nn.Identity(), target="five", criterion="mse", on="vector"),
            "side": Regression(2, head=On("side", 3, 2), target="pair", weight=1.3),
            "terms": InTerms(terms, "other", weight=0.4),
            "aside": Regression(2, head=On("maps", 4, 2), target="last", mode="detached"),
            "again": Regression(2, head=On("maps", 4, 2, terms if tied else None), target="pair"),
        },
        inputs="image",
        necks={"vector": Neck(Mean(), on="fpn"), "fpn": Neck(Pyramid())},
    )
    return model.double()


def batch(seed: int, *, samples: int = 3, without: Sequence[str] = (), **entries: Any) -> dict[str, Any]:
    """A batch for ``tree``, with some labels missing, and all of some targets."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, generator=random, dtype=torch.float64)

    def missing(target: Tensor, label: float) -> Tensor:
        gone = torch.rand(target.shape, generator=random) < 0.4
        gone.view(-1)[0] = False
        return torch.where(gone, torch.tensor(label, dtype=target.dtype), target)

    def classes(*shape: int) -> Tensor:
        return torch.randint(0, 3, (samples, *shape), generator=random)

    nan = float("nan")
    made = {
        "image": normal(3, 4, 4),
        "seg": missing(classes(4, 4), 255),
        "cls": missing(classes(), -100),
        "five": missing(normal(5), nan),
        "pair": missing(normal(2), nan),
        "other": missing(normal(2), nan),
        "last": missing(normal(2), nan),
        **entries,
    }
    for target in without:
        label = {"seg": 255, "cls": -100}.get(target, nan)
        made[target] = torch.full_like(made[target], label)
    return made


# --- one step, on the ranks and in one process ---------------------------------------------------------


@dataclass
class Stepped:
    """What one rank saw of a step, in full tensors."""

    gradients: dict[str, Tensor | None]
    result: StepResult
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def made(build: Build, kind: str) -> MultiTaskModel:
    """The model that a rank trains."""
    model = build()
    if kind == "fsdp":
        shard(model)
    return model


def engine_of(kind: str, model: MultiTaskModel, *arguments: Any, **options: Any) -> Engine:
    """The engine that it trains it with."""
    if kind == "plain":
        from plain_ranks import PlainAllReduce  # on the path of the tests that train with it

        options["parallel"] = PlainAllReduce()
    engine = Engine(model, *arguments, **options)
    assert current_ranks().world_size == 1 or engine.ranks.kind == kind
    return engine


def step(build: Build, kind: str, windows: Windows, options: dict[str, Any]) -> Stepped:
    """One step of plain gradient descent with this rank's window."""
    model = made(build, kind)
    seen: dict[str, Tensor | None] = {}

    def look(model: MultiTaskModel) -> None:
        seen.update(full_gradients(model))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(kind, model, optimizer, on_gradients=look, **options)
    result = engine.step(windows[current_ranks().rank])
    current_ranks().average_buffers(model)
    return Stepped(seen, result, full_parameters(model), dict(model.named_buffers()))


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients; to be called on all ranks."""
    return {
        name: None if parameter.grad is None else full_tensor(parameter.grad).clone()
        for name, parameter in model.named_parameters()
    }


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters; to be called on all ranks."""
    return {name: full_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}


@dataclass
class Expected:
    """The same step in one process: by definition, and by an engine."""

    reference: Reference
    result: StepResult
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def expected(build: Build, windows: Windows, options: dict[str, Any]) -> Expected:
    """A step of one process on the micro-batches of all ranks.

    Buffers become the mean of what each rank's window alone makes of them.
    """
    batches = [batch for window in windows for batch in window]
    model = build()
    reference = joint_reference(model, batches)
    apart = [
        joint_reference(model, window).buffers if window else dict(model.named_buffers())
        for window in windows
    ]
    buffers = {name: sum(each[name] for each in apart) / len(apart) for name in dict(model.named_buffers())}
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), **options).step(batches)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Expected(reference, result, parameters, buffers)


def assert_equal_steps(found: Sequence[Stepped], one: Expected, tolerance: float = 1e-10) -> None:
    """All ranks saw the step of one process."""
    for rank, stepped in enumerate(found):
        assert_equal_gradients(stepped.gradients, one.reference.gradients, tolerance)
        assert_same_result(stepped.result, found[0].result)
        for name, parameter in stepped.parameters.items():
            assert torch.equal(parameter, found[0].parameters[name]), f"rank {rank}: {name}"
            assert_close(name, parameter, one.parameters[name], tolerance)
        for name, buffer in stepped.buffers.items():
            assert torch.equal(buffer, found[0].buffers[name]), f"rank {rank}: {name}"
            if buffer.is_floating_point():
                assert_close(name, buffer, one.buffers[name], tolerance)
    result, of_one = found[0].result, one.result
    assert result.counts == of_one.counts
    assert result.idle == of_one.idle
    assert result.stepped is of_one.stepped
    for ours, theirs in ((result.losses, of_one.losses), (result.loss_terms, of_one.loss_terms)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype, name
            assert_close(name, ours[name], theirs[name], tolerance)
    assert (result.grad_norm is None) == (of_one.grad_norm is None)
    if result.grad_norm is not None and of_one.grad_norm is not None:
        assert_close("grad_norm", result.grad_norm, of_one.grad_norm, tolerance)


def assert_equal_gradients(own: dict[str, Tensor | None], reference: Any, tolerance: float = 1e-10) -> None:
    """Equal up to a tolerance, and None for the same parameters."""
    assert own.keys() == reference.keys()
    none = {name for name, gradient in own.items() if gradient is None}
    assert none == {name for name, gradient in reference.items() if gradient is None}
    for name in own.keys() - none:
        assert_close(name, own[name], reference[name], tolerance)  # type: ignore[arg-type]


def assert_close(name: str, own: Tensor, other: Tensor, tolerance: float = 1e-10) -> None:
    """Equal up to a tolerance, which is absolute for what is smaller than 1."""
    assert own.shape == other.shape, name
    difference = (own - other).abs().max().item() if own.numel() else 0.0
    assert difference <= tolerance * max(1.0, other.abs().max().item() if other.numel() else 0.0), (
        f"{name}: differs by {difference:.2e}"
    )


def assert_same_result(one: StepResult, other: StepResult) -> None:
    """Bit for bit and in the same order; the number of micro-batches is each rank's own."""
    for ours, theirs in ((one.losses, other.losses), (one.loss_terms, other.loss_terms)):
        assert list(ours) == list(theirs)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype, name
            assert torch.equal(ours[name], theirs[name]), name
    assert list(one.counts.items()) == list(other.counts.items())
    assert list(one.idle.items()) == list(other.idle.items())
    assert (one.stepped, one.nonfinite) == (other.stepped, other.nonfinite)
    assert (one.grad_norm is None) == (other.grad_norm is None)
    if one.grad_norm is not None and other.grad_norm is not None:
        assert torch.equal(one.grad_norm, other.grad_norm)


def raised(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The error that a call ends with, as ``ConfigError: ...``."""
    try:
        function(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
