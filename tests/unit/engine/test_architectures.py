"""Architectures that are refused, or need something that not every schedule has; for the others see
``test_contract.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import Made, Scored, line, on, trunk, two_heads, vectors
from helpers import (
    SCHEDULE_NAMES,
    assert_close_gradients,
    joint_reference,
)
from torch import Tensor, nn

from mtaccum import Engine, FeatureError, InplaceError, MultiTaskModel, TaskError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay"),
    pytest.mark.filterwarnings("ignore:.*nn.utils.weight_norm.*deprecated:FutureWarning"),
]

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)


# --- what is refused --------------------------------------------------------------------------------------


def run(model: MultiTaskModel, schedule: str, batch: Any = None, **settings: Any) -> None:
    """One window of one batch."""
    torch.manual_seed(0)
    Engine(model.double(), schedule=schedule, **settings).accumulate([batch or vectors(4, 0)])


@schedules
@pytest.mark.parametrize(
    ("recompute", "message"),
    [((), "'trunk' writes in place into the features"), (("trunk",), "'trunk' writes in place into its in")],
)
def test_a_trunk_that_writes_into_the_batch_is_refused_b2(
    schedule: str, recompute: tuple[str, ...], message: str
) -> None:
    # a second pass would normalise the image twice
    def normalise(self: Any, x: Tensor) -> Tensor:
        x -= x.mean(0)
        return self.layer(x)

    model = two_heads(Made(normalise, layer=line(3, 4)), line(), line())
    with pytest.raises(InplaceError, match=message):
        run(model, schedule, recompute=recompute)
    assert all(parameter.grad is None for parameter in model.parameters())


RESHAPES: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda f: f.t_(),
    "there and back": lambda f: f.unsqueeze_(0).squeeze_(0),
    "out=": lambda f: torch.add(f.detach(), 1, out=f.detach()),
    "set_": lambda f: f.set_(torch.zeros_like(f)),
    "dropout": lambda f: F.dropout(f, 0.5, inplace=True),
}


@schedules
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("kind", RESHAPES)
def test_a_head_that_reshapes_or_overwrites_features_is_refused_b2(
    schedule: str, learns: bool, kind: str
) -> None:
    def head(self: Any, f: Tensor) -> Tensor:
        RESHAPES[kind](f)
        return self.layer(f)

    model = two_heads(trunk(lambda f: f).requires_grad_(learns), Made(head, layer=line()), line())
    with pytest.raises(InplaceError, match="'a' writes in place"):
        run(model, schedule)


@schedules
def test_a_loss_that_writes_into_features_is_refused_b2(schedule: str) -> None:
    # with a head that hands on what it got, the prediction is the features
    tasks = {
        "a": Scored(nn.Identity(), lambda prediction, _: prediction.clamp_(min=0).sum()),
        "b": Scored(line()),
    }
    with pytest.raises(InplaceError, match="'a' writes in place"):
        run(MultiTaskModel(trunk(lambda f: f), tasks, inputs="x"), schedule)


class Keeps(nn.Module):
    """A trunk that also keeps its features, for heads that look them up instead of using their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = line(3, 4)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x).tanh()
        return self.kept


# Not ("trunk",) with both: the first head's backward runs the trunk again, and the second one then finds the
# features of that run, with a graph of their own; the gradients are right.
@pytest.mark.parametrize(
    ("looks", "recompute"), [("a", ()), ("b", ()), ("both", ()), ("a", ("trunk",)), ("b", ("trunk",))]
)
def test_a_head_that_reaches_past_the_cut_is_told_so(looks: str, recompute: tuple[str, ...]) -> None:
    shared = Keeps()
    past = Made(lambda self, f: self.layer(shared.kept), layer=line())
    a, b = (copy.deepcopy(past) if looks in (name, "both") else line() for name in "ab")
    model = two_heads(shared, a, b)
    with pytest.raises(TaskError, match="reached a graph that another loss's backward had freed"):
        run(model, "split", recompute=recompute)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_on_the_gradient_by_the_inputs_needs_the_whole_path() -> None:
    # in split a head's graph ends at the cut
    def penalty(prediction: Tensor, batch: Any) -> Tensor:
        (slope,) = torch.autograd.grad(prediction.sum(), batch["x"], create_graph=True)
        return slope.square().sum()

    def model() -> MultiTaskModel:
        torch.manual_seed(0)
        tasks = {"a": Scored(line(), penalty), "b": Scored(line())}
        return MultiTaskModel(trunk(lambda f: f), tasks, inputs="x").double()

    batch = vectors(4, 0)
    batch["x"].requires_grad_()
    reference = joint_reference(model(), [batch])
    for schedule in ("summed", "sequential"):
        run(whole := model(), schedule, batch)
        assert_close_gradients(whole, reference, 1e-12)
    with pytest.raises(TaskError, match="the loss of task 'a'.*appears to not have been used in the graph"):
        run(model(), "split", batch)


@dataclass
class WithRest:
    """Its second tensor is no field."""

    x: Tensor

    def __post_init__(self) -> None:
        self.double = self.x * 2


class DictWithRest(dict):  # type: ignore[type-arg]
    """Has a tensor beside its entries."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x=x)
        self.double = x * 2


HIDING: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], str]] = {
    "distribution": (lambda f: torch.distributions.Normal(f, 1.0), lambda f: f.mean, "Normal"),
    "set": (lambda f: {f}, lambda f: next(iter(f)), "set"),
    "iterator": (lambda f: iter([f, f]), next, "list_iterator"),
    "generator": (lambda f: (x for x in (f, f)), next, "generator"),
    "values of a dict": (lambda f: {"f": f}.values(), lambda f: next(iter(f)), "dict_values"),
    "dataclass with more": (WithRest, lambda f: f.double, "WithRest"),
    "dict with more": (DictWithRest, lambda f: f.double, "DictWithRest"),
}


@pytest.mark.parametrize("recompute", [(), ("trunk",)])
@pytest.mark.parametrize("kind", HIDING)
def test_features_that_hide_tensors_are_refused_by_type(kind: str, recompute: tuple[str, ...]) -> None:
    make, take, shown = HIDING[kind]
    model = two_heads(trunk(make), on(take), on(take))
    with pytest.raises(FeatureError, match=rf"{shown}.*register_structure"):
        run(model, "split", recompute=recompute)
    assert all(parameter.grad is None for parameter in model.parameters())


@schedules
def test_a_complex_loss_names_the_task(schedule: str) -> None:
    tasks = {"a": Scored(line(), lambda prediction, _: torch.fft.fft(prediction).sum()), "b": Scored(line())}
    with pytest.raises(TaskError, match="the loss of task 'a'.*must be a real 0-d tensor"):
        run(MultiTaskModel(trunk(lambda f: f), tasks, inputs="x"), schedule)


@schedules
def test_batchnorm_on_a_single_sample_names_its_node(schedule: str) -> None:
    model = two_heads(nn.Sequential(line(3, 4), nn.BatchNorm1d(4)), line(), line())
    with pytest.raises(TaskError, match=r"trunk \(Sequential on 'inputs'\).*Expected more than 1 value"):
        run(model, schedule, vectors(1, 0))


@schedules
def test_a_trunk_in_inference_mode_names_the_head_that_can_not_learn_from_it(schedule: str) -> None:
    def frozen(self: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.layer(x)

    with pytest.raises(TaskError, match=r"task 'a' \(head Linear on 'trunk'\).*Inference tensors"):
        run(two_heads(Made(frozen, layer=line(3, 4)), line(), line()), schedule)


@schedules
def test_a_segment_that_is_not_called_as_a_module_is_warned_of(schedule: str) -> None:
    model = two_heads(
        Made(lambda self, x: self.attention(x, x, x)[0], attention=nn.MultiheadAttention(3, 1)),
        line(3),
        line(3),
    )
    with pytest.warns(UserWarning, match=r"recompute: trunk\.attention\.out_proj did not run as a module"):
        run(model, schedule, recompute=("trunk.attention.out_proj",))


@schedules
def test_a_segment_that_does_otherwise_when_it_runs_again_is_refused(schedule: str) -> None:
    class Counts(nn.Module):
        """Runs its layer at odd calls only; the count is no buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = line(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) if self.calls % 2 else x * 2

    model = two_heads(nn.Sequential(line(3, 4), Counts()), line(), line())
    with pytest.raises(TaskError, match="a recomputed segment.* did not do the same when it ran again"):
        run(model, schedule, recompute=("trunk[1]",))
    assert all(parameter.grad is None for parameter in model.parameters())
