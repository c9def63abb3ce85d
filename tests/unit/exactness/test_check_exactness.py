"""check_exactness: passes where the contract holds, and names each fault that was planted."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import RandomState, assert_equal_states, awkward_batch, awkward_model, plain_batch, plain_model
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from mtaccum import (
    BatchError,
    Classification,
    ConfigError,
    MultiTaskModel,
    Neck,
    Regression,
    Task,
    check_exactness,
    split_batch,
)
from mtaccum.exactness import ExactnessReport, Finding
from mtaccum.exactness.reference import compare
from mtaccum.exactness.subject import copy_of
from mtaccum.observe import observing

SCHEDULES = ("summed", "sequential", "split")


class Head(nn.Sequential):
    """A linear head that does something to its features first."""

    def __init__(self, before: Callable[[Tensor], Tensor] | None = None, out: int = 2) -> None:
        super().__init__(nn.Linear(6, out))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.before is None else self.before(x))


def make(
    head: nn.Module | None = None, trunk: nn.Module | None = None, task: Task | None = None
) -> MultiTaskModel:
    """A trunk with a sound head ``good``, and one that is put to the test."""
    torch.manual_seed(0)
    return MultiTaskModel(
        trunk or nn.Sequential(nn.Linear(3, 6), nn.Tanh()),
        {
            "good": Regression(2, head=Head(), target="y"),
            "bad": task or Regression(2, head=head or Head(), target="y", weight=0.5),
        },
        inputs="x",
    )


def batch(samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.rand(samples, 2, generator=generator)
    y[::3, 0] = float("nan")  # missing unevenly
    return {"x": torch.rand(samples, 3, generator=generator), "y": y}


def faults(report: ExactnessReport) -> dict[str, Finding]:
    return {finding.kind: finding for finding in report.findings if finding.fault}


def notes(report: ExactnessReport) -> dict[str, Finding]:
    return {finding.kind: finding for finding in report.findings if not finding.fault}


# --- where it holds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [(), ("trunk",), ("trunk.conv", "fpn", "seg")])
def test_an_awkward_model_is_exact(schedule: str, recompute: Sequence[str]) -> None:
    report = check_exactness(awkward_model(), [awkward_batch(6)], schedule=schedule, recompute=recompute)
    assert report.exact, report
    assert set(report.differences) == {"trunk", "fpn", "deep", *awkward_model().tasks}
    assert all(difference <= 1e-12 for difference in report.differences.values())
    assert set(report.bounds.values()) == {1e-12}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_single_precision_weights_and_batches_are_compared_in_double(schedule: str) -> None:
    model, window = plain_model().float(), split_batch(plain_batch(12, missing=0.4), 3)
    window = [{k: v.float() if v.is_floating_point() else v for k, v in part.items()} for part in window]
    report = check_exactness(model, window, schedule=schedule)
    assert report.exact, report
    assert max(report.differences.values()) <= 1e-12
    assert report.samples == [4, 4, 4]


def test_modes_weights_and_frozen_modules_are_those_of_the_model() -> None:
    model = awkward_model()
    model.task("seg").mode, model.task("depth").mode, model.task("left").mode = "frozen", "detached", "off"
    model.necks["fpn"].requires_grad_(False)
    report = check_exactness(model, [awkward_batch(6)], schedule="sequential")
    assert report.exact, report


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_model_optimizer_batches_and_random_state_stay_as_they_were(schedule: str) -> None:
    model, given = awkward_model().float(), awkward_batch(6)
    given = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    held, modes = copy.deepcopy(optimizer.state_dict()), [m.training for m in model.modules()]
    inputs, random_state = {k: v.clone() for k, v in given.items()}, RandomState()
    random.seed(3)
    python = random.getstate()

    check_exactness(model, split_batch(given, 2), schedule=schedule, recompute=["trunk"], optimizer=optimizer)

    assert RandomState() == random_state
    assert random.getstate() == python
    assert_equal_states(dict(model.state_dict()), dict(state))
    assert all(buffer is dict(model.named_buffers())[name] for name, buffer in buffers.items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert optimizer.state_dict() == held
    assert [module.training for module in model.modules()] == modes
    for name, tensor in inputs.items():
        assert torch.equal(given[name].nan_to_num(9), tensor.nan_to_num(9)), name


def test_an_old_spectral_norm_that_has_run_can_be_copied() -> None:
    model = make(trunk=nn.Sequential(spectral_norm(nn.Linear(3, 6)), nn.Tanh()))
    model(batch())
    report = check_exactness(model, [batch()], schedule="sequential")
    assert report.exact, report


def test_a_copy_keeps_what_is_shared_and_widens_plain_tensors() -> None:
    model = awkward_model().float()
    model.trunk.norm.register_buffer("shared", torch.ones(2))
    model.necks["fpn"].register_buffer("shared", model.trunk.norm.shared)
    model.trunk.plain = torch.full((2,), 0.1)
    copied = copy_of(model, torch.device("cpu"), double=True)
    assert copied.trunk.norm.shared is copied.necks["fpn"].shared
    assert copied.task("left").head.layer.weight is copied.task("right").head.layer.weight
    assert copied.trunk.plain.dtype == torch.float64
    assert copied.trunk.norm.num_batches_tracked.dtype == torch.int64
    assert model.trunk.plain.dtype == torch.float32


# --- ten and more planted faults --------------------------------------------------------------------------


class WrongCount(Regression):
    """A mean over known values that says it is one over samples."""

    def count(self, batch: Any) -> Any:
        return len(batch["y"])


def test_a_count_that_does_not_match_the_loss_is_named() -> None:
    task = WrongCount(2, head=Head(), target="y")
    found = faults(check_exactness(make(task=task), [batch()]))
    assert set(found) == {"count"}
    assert found["count"].where == "bad"
    assert "additive = False" in found["count"].message


class CountsAlmost(Regression):
    """A mean over known values that says it is over a millionth more of the second sample's, and of all
    later ones'."""

    def count(self, batch: Any) -> Any:
        known = ~batch["y"].isnan()
        return (known.sum(1) * (1 + 1e-6 * batch["late"])).sum()


def test_a_count_that_is_a_little_off_is_named() -> None:
    given = {**batch(), "late": (torch.arange(8) > 0).double()}
    assert faults(check_exactness(make(task=CountsAlmost(2, head=Head(), target="y")), [given])).keys() == {
        "count"
    }
    even = {**given, "late": torch.ones(8)}  # of all samples alike: the mean is the same
    assert check_exactness(make(task=CountsAlmost(2, head=Head(), target="y")), [even]).exact


class CountsBatches(Regression):
    """Counts a batch, whatever its size."""

    def count(self, batch: Any) -> Any:
        return 1


def test_a_count_that_does_not_add_up_is_named() -> None:
    found = faults(check_exactness(make(task=CountsBatches(2, head=Head(), target="y")), [batch()]))
    assert "one by one" in found["count"].message


class WithItsLoss(Head):
    """A head that computes its loss in the forward."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return {"scores": scores, "loss": scores.square().mean()}


class CountsLate(Task):
    """A mean over all samples that says it is one over the late ones."""

    def loss(self, prediction: dict[str, Tensor], batch: Any) -> Tensor:
        return prediction["loss"]

    def count(self, batch: Any) -> Any:
        return batch["late"].sum()


def test_a_count_is_compared_with_a_loss_from_the_forward_too() -> None:
    model, given = make(task=CountsLate(WithItsLoss(), "late")), batch()
    late = {**given, "late": (torch.arange(8) > 2).double()}
    assert faults(check_exactness(model, [late]))["count"].where == "bad"
    assert check_exactness(model, [{**given, "late": torch.ones(8)}]).exact


class Dice(Task):
    """A ratio of sums, and so no mean over labels."""

    def __init__(self, additive: bool | None = None) -> None:
        super().__init__(Head(), target="x")
        if additive is not None:
            self.additive = additive  # type: ignore[misc]

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        p, y = prediction.sigmoid(), batch["x"][:, :2]
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def test_a_loss_that_is_no_mean_is_named_l7() -> None:
    assert faults(check_exactness(make(task=Dice()), [batch()]))["count"].where == "bad"
    declared = check_exactness(make(task=Dice(additive=False)), [batch()])
    assert declared.exact
    assert notes(declared)["non-additive loss"].where == "bad"
    accumulated = check_exactness(make(task=Dice(additive=False)), split_batch(batch(), 2))
    assert faults(accumulated)["non-additive loss"].where == "bad"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_head_that_writes_into_shared_features_is_named_b2(schedule: str) -> None:
    found = faults(check_exactness(make(Head(lambda x: x.clamp_(min=0))), [batch()], schedule=schedule))
    assert "'bad' writes in place" in found["in-place"].message


def test_a_parameter_that_no_task_reaches_is_named_b5() -> None:
    model = make()
    model.trunk.register_parameter("lost", nn.Parameter(torch.ones(3)))
    model.task("bad").head.register_parameter("also", nn.Parameter(torch.ones(3)))
    found = faults(check_exactness(model, [batch()]))
    assert set(found) == {"unreached parameters"}
    assert found["unreached parameters"].where == "trunk.lost, tasks.bad.head.also"


def test_a_parameter_that_the_optimizer_lacks_is_named() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.trunk.parameters(), lr=0.1)
    found = faults(check_exactness(model, [batch()], optimizer=optimizer))
    assert "tasks.good.head.0.weight" in found["optimizer"].message
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    assert check_exactness(model, [batch()], optimizer=whole).exact


def test_batchnorm_with_micro_batches_is_named_s4() -> None:
    model = make(trunk=nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh()))
    found = faults(check_exactness(model, split_batch(batch(), 4)))
    assert set(found) == {"coupled samples"}
    assert found["coupled samples"].where == "trunk.1"
    assert "accumulate=4" in found["coupled samples"].message
    assert check_exactness(model, [batch()]).exact
    assert notes(check_exactness(model, [batch()]))["coupled samples"].where == "trunk.1"
    frozen = check_exactness(model, split_batch(batch(), 4), batchnorm="freeze")
    assert frozen.exact, frozen
    assert "coupled samples" not in notes(frozen)


def test_a_first_layer_that_couples_samples_is_named() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    report = check_exactness(make(trunk=nn.Sequential(Centred(), nn.Linear(3, 6))), split_batch(batch(), 2))
    assert faults(report)["coupled samples"].where == "trunk.0"


def test_any_layer_that_couples_samples_is_named() -> None:
    report = check_exactness(make(Head(lambda x: x - x.mean(0))), split_batch(batch(), 2))
    assert faults(report)["coupled samples"].where == "bad"


class Numbered(nn.Module):
    """Each sample's number, and its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(x)), x


class OwnGenerator(nn.Module):
    """Noise of a generator that no replay knows; one of two results of the module that hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)
        self.noise = Numbered()
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        _, noise = self.noise(torch.from_numpy(self.generator.random(len(x))).to(x)[:, None])
        return self.linear(x) * noise


class Counting(nn.Module):
    """State in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


@pytest.mark.parametrize("schedule", ["sequential", "split"])
@pytest.mark.parametrize(("trunk", "where"), [(OwnGenerator, "trunk.noise"), (Counting, "trunk")])
def test_what_a_replay_can_not_repeat_is_named_s3(schedule: str, trunk: type[nn.Module], where: str) -> None:
    found = faults(check_exactness(make(trunk=trunk()), [batch()], schedule=schedule))
    assert found["randomness"].where == where
    # where nothing repeats the gradients are right all the same
    assert ("gradient" in found) == (schedule == "sequential")


class Drifting(nn.Module):
    """Gives a little more each time that it runs."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)
        self.by, self.calls = by, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + self.by * self.calls)


def test_a_repeat_that_differs_a_little_is_named_and_rounding_is_not() -> None:
    assert faults(check_exactness(make(trunk=Drifting(1e-6)), [batch()]))["randomness"].where == "trunk"
    report = check_exactness(make(trunk=Drifting(1e-14)), [batch()])
    assert report.exact, report


def test_numpy_and_python_randomness_is_no_fault_s3() -> None:
    noise = Head(lambda x: x * torch.from_numpy(np.random.rand(len(x))).to(x)[:, None] * random.random())
    for schedule in SCHEDULES:
        report = check_exactness(make(noise), [batch()], schedule=schedule, recompute=["trunk", "bad"])
        assert report.exact, report


class Keeping(Head):
    """A head that keeps its output, and with it its graph; for the other heads to see, alive."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.graphs = [*getattr(self, "graphs", []), hidden.square()]
        return hidden


@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_a_head_that_keeps_a_graph_is_named(schedule: str) -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Sequential(nn.Linear(3, 6), nn.Tanh()),
        {
            "bad": Regression(2, head=Keeping(), target="y"),
            "good": Regression(2, head=Head(), target="y"),
        },
        inputs="x",
    )
    found = faults(check_exactness(model, [batch()], schedule=schedule))
    assert "graphs alive" in found
    assert "detach" in found["graphs alive"].message


def three(**heads: nn.Module) -> MultiTaskModel:
    """A trunk and sound heads a, b and c, but for those that are given."""
    torch.manual_seed(0)
    tasks = {n: Regression(2, head=heads.get(n) or Head(), target="y", weight=0.5) for n in "abc"}
    return MultiTaskModel(nn.Sequential(nn.Linear(3, 6), nn.Tanh()), tasks, inputs="x")


@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_the_graphs_of_a_group_are_no_fault_and_one_that_is_kept_longer_is(schedule: str) -> None:
    groups = [["a", "b"]]
    report = check_exactness(three(), [batch()], schedule=schedule, head_groups=groups)
    assert report.exact, report
    assert {name: heads for name, (heads, _) in report.alive.items()} == dict.fromkeys(["trunk", *"abc"], 0)

    report = check_exactness(three(a=Keeping()), [batch()], schedule=schedule, head_groups=groups)
    assert [f.where for f in report.findings if f.kind == "graphs alive" and "c" in f.where] == ["c"]
    assert report.alive["b"][0] == 0


# --- head groups and chunks -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sequential", "split"])
@pytest.mark.parametrize("sizes", [[6], [4, 2]], ids=str)
def test_an_awkward_model_in_head_groups_is_exact(sizes: list[int], schedule: str) -> None:
    groups, window = [["cls", "depth"], ["left", "right"], ["seg", "bare"]], list(map(awkward_batch, sizes))
    report = check_exactness(
        awkward_model(),
        window,
        schedule=schedule,
        head_groups=groups,
        batchnorm="freeze",
        recompute=["trunk", "seg"],
    )
    assert report.exact, report
    assert max(report.differences.values()) <= 1e-12


def test_a_group_that_changes_the_order_of_heads_that_draw_is_exact() -> None:
    heads = {name: nn.Sequential(nn.Dropout(0.4), nn.Linear(6, 2)) for name in "abc"}
    report = check_exactness(three(**heads), [batch()], head_groups=[["a", "c"]])
    assert report.exact, report
    assert "randomness" not in notes(report)


@pytest.mark.parametrize("sizes", [[6], [4, 2]], ids=str)
def test_an_awkward_model_in_chunks_is_exact(sizes: list[int]) -> None:
    chunks = {"seg": 2, "bare": 3, "left": 100}
    window = list(map(awkward_batch, sizes))
    report = check_exactness(
        awkward_model(), window, chunks=chunks, batchnorm="freeze", recompute=["trunk", "seg"]
    )
    assert report.exact, report
    assert "randomness" not in notes(report)  # which others draw
    assert max(report.differences.values()) <= 1e-12


class Stages:
    """The backwards that there were, by name."""

    def __init__(self) -> None:
        self.backwards: list[str] = []

    def begins(self, node: str, phase: str) -> None:
        if phase == "backward":
            self.backwards.append(node)

    def ends(self, node: str, phase: str) -> None: ...

    def cut(self, leaves: Sequence[Tensor]) -> None: ...


def test_heads_do_run_in_these_head_groups_and_chunks() -> None:
    for settings, backwards in (
        ({}, ["a", "b", "c"]),
        ({"head_groups": [["a", "b"]]}, ["a+b", "c"]),
        ({"chunks": {"b": 3}}, ["a", "b", "b", "b", "c"]),
    ):
        stages = Stages()
        with observing(stages):
            report = check_exactness(three(), [batch()], **settings)
        assert stages.backwards == [*backwards, "trunk"]
        assert "memory" not in notes(report)


class Centred(nn.Module):
    """Takes the mean over the samples away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_head_in_chunks_that_couples_samples_is_a_fault_even_of_one_micro_batch(micro_batches: int) -> None:
    window = split_batch(batch(), micro_batches)
    report = check_exactness(three(a=Centred(), b=Centred()), window, chunks={"a": 2, "c": 2})
    coupled = {f.where: f for f in report.findings if f.kind == "coupled samples"}
    assert set(coupled) == {"a", "b"}
    assert coupled["a"].fault
    assert "in chunks" in coupled["a"].message
    assert coupled["b"].fault == (micro_batches > 1)
    assert "in chunks" not in coupled["b"].message
    assert not report.exact


def test_a_state_that_moves_with_each_chunk_is_a_fault() -> None:
    report = check_exactness(three(a=spectral_norm(nn.Linear(6, 2))), [batch()], chunks={"a": 2})
    assert faults(report)["gradient"].where in ("a", "trunk")


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.RReLU()], ids=str)
def test_a_head_in_chunks_that_draws_is_compared_without_and_it_says_so(layer: nn.Module) -> None:
    head = nn.Sequential(layer, nn.Linear(6, 6), copy.deepcopy(layer), nn.Linear(6, 2))
    model = three(a=head, b=copy.deepcopy(head), c=copy.deepcopy(head))
    report = check_exactness(model, split_batch(batch(), 2), chunks={"a": 3, "c": 1})
    assert report.exact, report
    drawing = [f for f in report.findings if f.kind == "randomness"]
    assert [(f.where, f.fault) for f in drawing] == [("a", False)]
    assert "evaluation mode" in drawing[0].message
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_a_head_in_chunks_that_always_draws_is_named(source: str) -> None:
    def noise(x: Tensor) -> Tensor:
        if source == "torch":
            return x * torch.rand(()).to(x)
        return x * (np.random.rand() if source == "numpy" else random.random())

    report = check_exactness(three(a=Head(noise)), [batch()], chunks={"a": 2})
    assert notes(report)["randomness"].where == "a"
    assert "gradient" in faults(report)  # nothing can be said of it


def test_a_count_that_does_not_add_up_over_chunks_is_a_fault() -> None:
    found = faults(
        check_exactness(make(task=CountsBatches(2, head=Head(), target="y")), [batch()], chunks={"bad": 2})
    )
    assert "for its chunks together" in found["failure"].message


def test_head_groups_and_chunks_that_are_not_valid_are_errors() -> None:
    for settings, message in (
        ({"head_groups": [["a"]]}, "it takes two tasks or more"),
        ({"head_groups": [["a", "b"]], "schedule": "summed"}, "no effect with schedule='summed'"),
        ({"chunks": {"d": 2}}, "Known: a, b, c"),
        ({"chunks": {"a": 2}, "schedule": "sequential"}, "belongs to schedule='split'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_exactness(three(), [batch()], **settings)
    model = three(a=nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ConfigError, match=r"a\.1 normalises by what it sees"):
        check_exactness(model, [batch()], chunks={"a": 2})


class PassesBy(nn.Module):
    """A head that takes the trunk's features from the trunk itself, past the cut."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.trunk = [trunk]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.trunk[0].last)


class Remembering(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def test_a_head_that_reads_past_the_cut_is_found() -> None:
    trunk = Remembering()
    model = MultiTaskModel(
        trunk,
        {
            "bad": Regression(2, head=PassesBy(trunk), target="y"),
            "good": Regression(2, head=Head(), target="y"),
        },
        inputs="x",
    )
    report = check_exactness(model, [batch()])
    assert not report.exact
    assert "freed already" in str(report)


def test_a_forward_that_fails_is_a_fault_with_its_place() -> None:
    (failure,) = check_exactness(make(nn.Linear(7, 2)), [batch()]).findings  # nothing else was looked at
    assert (failure.kind, failure.fault) == ("failure", True)
    assert "mat1" in failure.message
    assert "task 'bad'" in failure.message


# --- what is said beside ----------------------------------------------------------------------------------


class Single(nn.Module):
    """A module that computes in single precision whatever it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_modules_that_force_single_precision_are_named_and_held_to_its_bound() -> None:
    forced = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
    model = make(trunk=forced)
    model.task("bad").head = nn.Sequential(Single(), Cast(nn.Linear(6, 2)))
    report = check_exactness(model, [batch()], schedule="sequential")
    assert report.exact, report
    assert set(report.bounds.values()) == {1e-5}
    assert notes(report)["precision"].where.startswith("bad")


class Cast(nn.Module):
    """A layer in single precision that can't be widened."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight.float(), self.layer.bias.float())


def test_a_model_that_does_not_run_in_double_is_compared_in_single() -> None:
    model = make(nn.Sequential(Single(), nn.Linear(6, 2)))
    report = check_exactness(model, [batch()], schedule="sequential")
    assert report.exact, report
    assert set(report.bounds.values()) == {1e-5}
    assert notes(report)["precision"].where == "bad.1"


class Selecting(nn.Module):
    """A mean over the positive entries, picked by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x[x > 0].mean()


def test_recurrent_modules_and_dynamic_shapes_are_noted() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(1, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x.unsqueeze(-1))[0][:, -1]

    found = [f for f in check_exactness(make(trunk=Recurrent()), [batch()]).findings if f.kind == "memory"]
    assert [f.where for f in found] == ["trunk.rnn"]
    assert not found[0].fault
    report = check_exactness(make(Selecting()), [batch()])
    assert notes(report)["memory"].where == "bad"


def test_idle_tasks_are_said_not_to_be_checked() -> None:
    unlabelled = {**batch(), "y": torch.full((8, 2), float("nan"))}
    model = make(task=Dice(additive=False))
    report = check_exactness(model, [unlabelled])
    assert report.exact, report
    assert notes(report)["labels"].where == "good"
    assert "unreached parameters" not in faults(report)
    nothing = check_exactness(make(), [unlabelled])
    assert faults(nothing)["labels"].where == "window"


def test_samples_are_cut_and_it_says_so() -> None:
    report = check_exactness(make(), split_batch(batch(20), 2), samples=8)
    assert report.samples == [4, 4]
    assert notes(report)["samples"].message == "8 of 20 samples were compared."
    assert "samples" not in notes(check_exactness(make(), split_batch(batch(8), 2), samples=8))


def test_of_a_single_sample_the_count_is_not_checked_and_it_says_so() -> None:
    report = check_exactness(make(), [batch(1)])
    assert report.exact, report
    assert "only one sample" in notes(report)["count"].message


def test_a_part_of_recompute_without_effect_is_noted() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight, self.inner.bias)

    report = check_exactness(make(trunk=Functional()), [batch()], recompute=["trunk.inner"])
    assert "trunk.inner did not run" in notes(report)["warning"].message


def test_what_is_alive_at_once_is_reported() -> None:
    summed = check_exactness(awkward_model(), [awkward_batch(6)], schedule="summed")
    split = check_exactness(awkward_model(), [awkward_batch(6)], schedule="split")
    both = check_exactness(awkward_model(), [awkward_batch(6)], schedule="split", recompute=["trunk"])
    assert max(heads for heads, _ in summed.alive.values()) == 6
    assert max(heads for heads, _ in split.alive.values()) == 0
    assert split.alive["cls"][1] > 0
    assert both.alive["cls"][1] == 0
    assert max(kept for _, kept in summed.alive.values()) > max(kept for _, kept in split.alive.values())
    text = str(split)
    assert all(word in text for word in ("trunk", "1e-12", "exact: the contract holds"))


def test_arguments_that_are_not_valid_are_errors() -> None:
    with pytest.raises(ConfigError, match="unknown schedule 'joint'"):
        check_exactness(make(), [batch()], schedule="joint")
    with pytest.raises(ConfigError, match=r"trunk\.9.*trunk\.0"):
        check_exactness(make(), [batch()], recompute=["trunk.9"])
    with pytest.raises(ConfigError, match="samples must be at least 1"):
        check_exactness(make(), [batch()], samples=0)
    with pytest.raises(BatchError, match="list of micro-batches"):
        check_exactness(make(), batch())  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="empty"):
        check_exactness(make(), [])


class Outdated(nn.Module):
    """Warns each time that it runs."""

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("use something else", FutureWarning, stacklevel=2)
        return x


def test_it_warns_of_nothing() -> None:
    trunk = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), Outdated())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_exactness(make(trunk=trunk, task=Dice(additive=False)), split_batch(batch(), 2))
    assert said == []


def test_necks_and_classes_are_compared_by_node() -> None:
    model = MultiTaskModel(
        None,
        {"a": Classification(3, head=nn.Linear(4, 3), target="c", on="neck")},
        inputs="x",
        necks={"neck": Neck(nn.Linear(3, 4), on="inputs")},
    )
    report = check_exactness(model, [{**batch(), "c": torch.arange(8) % 3}])
    assert report.exact, report
    assert set(report.differences) == {"neck", "a"}


# --- what must not mislead it -----------------------------------------------------------------------------


def test_a_forward_that_writes_into_its_input_leaves_the_users_batch_alone() -> None:
    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    model = make(trunk=Halves(3, 6)).double()
    given = {k: v.double() for k, v in batch().items()}
    before = given["x"].clone()
    check_exactness(model, [given])
    assert torch.equal(given["x"], before)


def test_a_gradient_on_one_side_only_is_a_difference() -> None:
    model = make()
    reference: dict[str, Tensor | None] = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    own = {**reference, "tasks.good.head.0.bias": None}
    differences, worst = compare(model, own, reference)
    assert differences == {"trunk": 0.0, "good": float("inf"), "bad": 0.0}
    assert worst["good"] == "tasks.good.head.0.bias"
    assert compare(model, reference, own)[0]["good"] == float("inf")


def test_a_head_on_two_nodes_is_not_blamed_for_the_layer_between_them() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(features[0] + features[1])

    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Linear(3, 6),
        {"both": Regression(2, head=Sum(), target="y", on=("trunk", "neck"))},
        inputs="x",
        necks={"neck": Neck(nn.BatchNorm1d(6))},
    )
    assert notes(check_exactness(model, [batch()]))["coupled samples"].where == "neck"


def test_time_in_front_is_no_coupling_of_samples() -> None:
    class Recurrent(nn.Module):
        """Of as many steps as there are samples, so that the shapes don't tell."""

        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 3, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x.expand(len(x), *x.shape))[0][-1]

    report = check_exactness(make(trunk=Recurrent()), split_batch(batch(), 2))
    assert "coupled samples" not in {finding.kind for finding in report.findings}, report
