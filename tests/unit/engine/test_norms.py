"""BatchNorm under accumulation: running statistics move once per batch, and the policies do what they say."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import (
    SCHEDULE_NAMES,
    Failing,
    Reference,
    Squared,
    assert_close_gradients,
    assert_equal_states,
    awkward_batch,
    awkward_model,
    joint_reference,
    seed_everything,
)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mtaccum import ConfigError, Engine, MultiTaskModel, Neck, Regression, TaskError, split_batch
from mtaccum.engine.norms import batch_normalised

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
pytestmark = pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def batch_norms(model: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


# --- running statistics move as far as without accumulation -----------------------------------------------

# A running mean of 0 that sees batches of mean 1 with momentum 0.1 is 0.1 afterwards; the weight that the
# new batches have is then the running mean itself.


class Ones(nn.Module):
    """A normalising layer, its input shifted so that each channel's mean is 1: (n, 2) to (n, 2)."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.detach() - x.detach().mean(0) + 1
        for norm in self.norms:
            x = x + norm(shifted)
        return x


def norm() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(2, dtype=torch.float64)


def model_of(trunk: nn.Module, **heads: nn.Module) -> MultiTaskModel:
    tasks = {name: Squared(nn.Sequential(head, nn.Linear(2, 1)), name) for name, head in heads.items()}
    return MultiTaskModel(nn.Sequential(nn.Linear(3, 2), trunk), tasks, inputs="x").double()


def window_of(*labels: str) -> list[dict[str, Tensor]]:
    """A micro-batch for each string, labelled for the tasks whose letters stand in it."""
    random = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, 3, generator=random, dtype=torch.float64), **{t: torch.ones(4) for t in tasks}}
        for tasks in labels
    ]


def assert_weighs(layer: nn.Module, weight: float) -> None:
    torch.testing.assert_close(
        layer.running_mean, torch.full((2,), weight, dtype=torch.float64), rtol=1e-13, atol=0
    )


def run(model: MultiTaskModel, window: list[Any], schedule: str, **settings: Any) -> None:
    Engine(model, schedule=schedule, **settings).accumulate(window)


@pytest.mark.parametrize(
    "recompute", [(), ("trunk",), ("trunk.1.norms.0", "a.0")], ids=["", "trunk", "segments"]
)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@schedules
def test_k_micro_batches_move_the_statistics_as_far_as_one_s1_s2(
    schedule: str, micro_batches: int, recompute: tuple[str, ...]
) -> None:
    trunk, head = norm(), norm()
    model = model_of(Ones(trunk), a=Ones(head), b=nn.Identity())
    run(model, window_of(*["ab"] * micro_batches), schedule, recompute=recompute)
    assert_weighs(trunk, 0.1)
    assert_weighs(head, 0.1)
    assert trunk.num_batches_tracked == head.num_batches_tracked == micro_batches


@pytest.mark.parametrize("active", [["a", "", "", ""], ["", "", "a", ""], ["", "a", "a", ""], ["a"] * 4])
@schedules
def test_a_head_that_is_active_in_some_micro_batches_moves_by_its_own_number_s2(
    schedule: str, active: list[str]
) -> None:
    trunk, head, other = norm(), norm(), norm()
    model = model_of(Ones(trunk), a=Ones(head), b=Ones(other))
    run(model, window_of(*(f"b{label}" for label in active)), schedule)
    for layer in (trunk, head, other):
        assert_weighs(layer, 0.1)
    assert head.num_batches_tracked == sum(map(bool, active))


@schedules
def test_a_trunk_of_which_no_task_has_labels_does_not_count_s2(schedule: str) -> None:
    trunk = norm()
    model = model_of(Ones(trunk), a=nn.Identity())
    run(model, window_of("", "a", "", "a"), schedule)
    assert_weighs(trunk, 0.1)
    assert trunk.num_batches_tracked == 2


@pytest.mark.parametrize("labels", [["ab"], ["ab"] * 4, ["ab", "a", "a", "a"], ["a", "a", "a", "b"]])
@schedules
def test_a_layer_that_two_heads_share_moves_twice_s2(schedule: str, labels: list[str]) -> None:
    # as without accumulation, where each of them runs it once
    shared = norm()
    run(model_of(nn.Identity(), a=Ones(shared), b=Ones(shared)), window_of(*labels), schedule)
    assert_weighs(shared, 1 - 0.9**2)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@schedules
def test_a_layer_that_one_node_runs_twice_moves_twice_s2(schedule: str, micro_batches: int) -> None:
    twice = norm()
    run(model_of(Ones(twice, twice), a=nn.Identity()), window_of(*["a"] * micro_batches), schedule)
    assert_weighs(twice, 1 - 0.9**2)


@schedules
def test_a_shared_layer_whose_other_head_is_idle_moves_once_s2(schedule: str) -> None:
    shared = norm()
    run(model_of(nn.Identity(), a=Ones(shared), b=Ones(shared)), window_of(*["a"] * 4), schedule)
    assert_weighs(shared, 0.1)


@pytest.mark.parametrize(("momentum", "weight"), [(0.3, 0.3), (1.0, 1.0), (0.0, 0.0), (None, 1.0)], ids=str)
@schedules
def test_any_momentum_is_kept_s2(schedule: str, momentum: float | None, weight: float) -> None:
    # None: the mean of all batches so far, and as many samples as there are in one batch
    layer = norm()
    layer.momentum = momentum
    run(model_of(Ones(layer), a=nn.Identity()), window_of(*["a"] * 3), schedule)
    assert_weighs(layer, weight)
    assert layer.momentum == momentum


@schedules
def test_instance_norm_keeps_statistics_too_s2(schedule: str) -> None:
    class Instances(nn.InstanceNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            positions = x.detach()[:, :, None] * torch.tensor([1.0, -1.0], dtype=x.dtype) + 1
            return x + super().forward(positions).mean(2)

    layer = Instances(2, track_running_stats=True, dtype=torch.float64)
    run(model_of(layer, a=nn.Identity()), window_of(*["a"] * 4), schedule)
    assert_weighs(layer, 0.1)


@pytest.mark.parametrize("recompute", [(), ("*",)], ids=["", "all recomputed"])
@schedules
def test_buffers_of_an_awkward_model_are_those_of_the_joint_pass_s1_s2(
    schedule: str, recompute: Sequence[str]
) -> None:
    model, window = awkward_model(), [awkward_batch(3), awkward_batch(2, seed=2), awkward_batch(4, seed=3)]
    window[1]["cls"].fill_(-100)
    window[2]["depth"].fill_(float("nan"))
    seed_everything(1)
    reference = joint_reference(model, window)
    seed_everything(1)
    run(model, window, schedule, recompute=recompute)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, reference.buffers[name], rtol=1e-12, atol=1e-14)


# --- the flags of modules come back -----------------------------------------------------------------------


def flags_of(model: nn.Module) -> list[tuple[Any, Any]]:
    return [(module.training, getattr(module, "momentum", None)) for module in model.modules()]


@pytest.mark.parametrize("policy", ["keep", "freeze"])
@pytest.mark.parametrize("broken", [False, True])
@schedules
def test_flags_are_as_before_after_a_window_and_after_an_error(
    schedule: str, broken: bool, policy: str
) -> None:
    head = Failing(nn.Linear(2, 2), RuntimeError("broken"))
    head.broken = broken
    evaluated, odd = norm().eval(), norm()
    odd.momentum = 0.25
    model = model_of(Ones(norm(), evaluated, odd), a=Ones(norm()), b=head)
    before = flags_of(model)
    engine = Engine(model, schedule=schedule, batchnorm=policy)
    if broken:
        with pytest.raises(TaskError, match="broken"):
            engine.accumulate(window_of("ab", "ab"))
    else:
        engine.accumulate(window_of("ab", "ab"))
    assert flags_of(model) == before


# --- freeze -----------------------------------------------------------------------------------------------


def with_statistics(model: MultiTaskModel) -> MultiTaskModel:
    """Running statistics as after some training."""
    for index, layer in enumerate(batch_norms(model).values()):
        torch.manual_seed(index)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return model


def joint_with_frozen_norms(model: MultiTaskModel, window: list[Any]) -> Reference:
    model = copy.deepcopy(model)
    for layer in batch_norms(model).values():
        layer.eval()
    return joint_reference(model, window)


@pytest.mark.parametrize("recompute", [(), ("trunk", "fpn.norm", "depth")], ids=["", "recomputed"])
@schedules
def test_freeze_normalises_by_the_running_statistics_and_leaves_them(
    schedule: str, recompute: Sequence[str]
) -> None:
    model = with_statistics(awkward_model())
    window = [awkward_batch(3), awkward_batch(2, seed=2)]
    norms = {name: buffers_of(layer) for name, layer in batch_norms(model).items()}
    seed_everything(1)
    reference = joint_with_frozen_norms(model, window)

    seed_everything(1)
    run(model, window, schedule, batchnorm="freeze", recompute=recompute)

    assert_close_gradients(model, reference, 1e-12)
    for name, layer in batch_norms(model).items():
        assert_equal_states(buffers_of(layer), norms[name])
        assert layer.training


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@schedules
def test_with_freeze_k_changes_nothing_n3(schedule: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    tasks = {"a": Regression(1, head=head, target="y"), "b": Squared(nn.Linear(4, 2))}
    model = with_statistics(MultiTaskModel(trunk, tasks, inputs="x").double())
    batch = {"x": torch.randn(8, 3, dtype=torch.float64), "y": torch.randn(8, 1, dtype=torch.float64)}
    batch["y"][5:] = float("nan")
    reference = joint_with_frozen_norms(model, [batch])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is nothing inexact in it
        run(model, split_batch(batch, micro_batches), schedule, batchnorm="freeze")
    assert_close_gradients(model, reference, 1e-12)


def test_freeze_refuses_layers_without_statistics_by_name() -> None:
    bare = nn.BatchNorm1d(2, track_running_stats=False)
    with pytest.raises(ConfigError, match=r"tasks\.a\.head\.0\.norms\.1 keeps none.*batchnorm=keep"):
        Engine(model_of(norm(), a=Ones(norm(), bare)), batchnorm="freeze")


# --- frozen nodes -----------------------------------------------------------------------------------------


def frozen_by_gradient(model: MultiTaskModel, node: str) -> nn.Module:
    module = model.own_modules()[node]
    module.requires_grad_(False)
    return module


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("node", ["trunk", "fpn", "depth"])
@schedules
def test_what_is_frozen_keeps_its_statistics_and_gradients_are_the_joint_ones_b4(
    schedule: str, node: str, mode: str
) -> None:
    model = with_statistics(awkward_model())
    window = [awkward_batch(3), awkward_batch(2, seed=2)]
    module = frozen_by_gradient(model, node)
    module.train(mode == "train")
    before, others = buffers_of(module), buffers_of(model)
    seed_everything(1)
    reference = joint_reference(model, window)

    seed_everything(1)
    engine = Engine(model, schedule=schedule)
    if mode == "train":
        with pytest.warns(UserWarning, match=f"{node} is frozen"):
            engine.accumulate(window)
    else:
        engine.accumulate(window)

    assert_equal_states(buffers_of(module), before)
    assert module.training is (mode == "train")
    assert_close_gradients(model, reference, 1e-12)
    moved = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, others[name])}
    assert any("running_mean" in name for name in moved), "the others' move on"


@pytest.mark.parametrize("recompute", [(), ("trunk", "depth.norm")], ids=["", "recomputed"])
@schedules
def test_the_head_of_a_frozen_task_keeps_its_statistics_b3(schedule: str, recompute: Sequence[str]) -> None:
    model = with_statistics(awkward_model())
    model.task("depth").mode = "frozen"
    window = [awkward_batch(3), awkward_batch(2, seed=2)]
    before = buffers_of(model.task("depth"))
    seed_everything(1)
    reference = joint_reference(model, window)
    seed_everything(1)
    run(model, window, schedule, recompute=recompute)
    assert_equal_states(buffers_of(model.task("depth")), before)
    assert_close_gradients(model, reference, 1e-12)


class RunsAgain(nn.Sequential):
    """Layers with a checkpoint of their own, which run once more in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return output


@schedules
def test_a_frozen_node_that_runs_again_in_the_backward_keeps_its_statistics_b4(schedule: str) -> None:
    frozen, learning = RunsAgain(norm(), nn.Tanh()), RunsAgain(norm(), nn.Tanh())
    model = model_of(nn.Identity(), a=frozen, b=learning)
    model.task("a").requires_grad_(False)
    run(model, window_of("ab"), schedule)
    assert torch.equal(frozen[0].running_mean, torch.zeros(2))
    assert not torch.equal(learning[0].running_mean, torch.zeros(2))


@schedules
def test_a_layer_shared_with_a_frozen_head_moves_for_the_other_alone_s2(schedule: str) -> None:
    shared = norm()
    model = model_of(nn.Identity(), a=Ones(shared), b=Ones(shared))
    model.task("b").mode = "frozen"
    run(model, window_of("ab"), schedule)
    assert_weighs(shared, 0.1)


@schedules
def test_a_layer_shared_with_a_frozen_head_moves_as_far_whatever_k_s2(schedule: str) -> None:
    shared = norm()
    model = model_of(nn.Identity(), a=Ones(shared), b=Ones(shared))
    model.task("b").mode = "frozen"
    run(model, window_of("ab", "ab", "b", "b"), schedule)
    assert_weighs(shared, 0.1)


# --- sync -------------------------------------------------------------------------------------------------


def test_sync_replaces_the_layers_and_keeps_parameters_and_names() -> None:
    model = awkward_model()
    parameters = dict(model.named_parameters())
    state = list(model.state_dict())
    norms = batch_norms(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.task("depth").head.norm.eval()
    with pytest.warns(UserWarning, match="one process only: it does what batchnorm='keep' does") as caught:
        engine = Engine(model, optimizer, batchnorm="sync")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert {name: type(layer) for name, layer in batch_norms(model).items()} == dict.fromkeys(
        norms, nn.SyncBatchNorm
    )
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == state
    assert not model.task("depth").head.norm.training
    assert engine.step([awkward_batch(3)]).stepped


@schedules
def test_sync_in_one_process_is_what_keep_is(schedule: str) -> None:
    one, other = awkward_model(), awkward_model()
    window = [awkward_batch(3), awkward_batch(2, seed=2)]
    for model, policy in ((one, "sync"), (other, "keep")):
        seed_everything(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = Engine(model, schedule=schedule, batchnorm=policy)
        engine.accumulate(window)
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert_equal_states(dict(one.named_buffers()), dict(other.named_buffers()))


@schedules
def test_a_trunk_and_a_neck_that_are_layers_themselves_are_replaced_too(schedule: str) -> None:
    model = MultiTaskModel(
        nn.BatchNorm1d(3),
        {"a": Squared(nn.Linear(3, 1), on="neck")},
        inputs="x",
        necks={"neck": Neck(nn.BatchNorm1d(3))},
    )
    with pytest.warns(UserWarning, match="one process"):
        engine = Engine(model, schedule=schedule, batchnorm="sync")
    assert type(model.trunk) is type(model.node("neck").module) is nn.SyncBatchNorm
    engine.accumulate([{"x": torch.rand(4, 3)}])
    assert model.trunk.num_batches_tracked == 1
    assert model.trunk.weight.grad is not None


@pytest.mark.filterwarnings("ignore:batchnorm='sync'", "error:recompute")
@schedules
def test_layers_that_sync_replaces_may_be_recomputed_s1(schedule: str) -> None:
    one, other = awkward_model(), awkward_model()
    window = [awkward_batch(3), awkward_batch(2, seed=2)]
    for model, policy, recompute in ((one, "sync", ["trunk.norm", "fpn.norm"]), (other, "keep", [])):
        seed_everything(1)
        run(model, window, schedule, batchnorm=policy, recompute=recompute)
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert_equal_states(dict(one.named_buffers()), dict(other.named_buffers()))


def test_sync_refuses_subclasses_by_name_and_changes_nothing() -> None:
    class Gated(nn.BatchNorm1d):
        pass

    model = model_of(norm(), a=Ones(norm(), Gated(2)))
    with pytest.raises(ConfigError, match=r"can't convert tasks\.a\.head\.0\.norms\.1: a Gated may"):
        Engine(model, batchnorm="sync")
    assert {type(layer) for layer in batch_norms(model).values()} == {nn.BatchNorm1d, Gated}


@pytest.mark.filterwarnings("ignore:batchnorm='sync'")
@pytest.mark.parametrize("settings", [{"recompute": ["nothing"]}, {"compile": {"backend": "nothing"}}])
def test_an_engine_that_is_refused_has_not_replaced_any_layer(settings: dict[str, Any]) -> None:
    model = model_of(norm(), a=Ones(norm()))
    with pytest.raises(ConfigError, match="nothing"):
        Engine(model, batchnorm="sync", **settings)
    assert {type(layer) for layer in batch_norms(model).values()} == {nn.BatchNorm1d}


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown batchnorm 'frozen'\. Did you mean 'freeze'\?.*sync"):
        Engine(model_of(norm(), a=nn.Identity()), batchnorm="frozen")


# --- which layers couple samples --------------------------------------------------------------------------


def test_layers_that_normalise_by_what_they_see() -> None:
    module = nn.ModuleDict(
        {
            "batch": nn.BatchNorm2d(2),
            "evaluated": nn.BatchNorm2d(2).eval(),
            "without": nn.BatchNorm2d(2, track_running_stats=False).eval(),
            "sync": nn.SyncBatchNorm(2),
            "instance": nn.InstanceNorm2d(2, track_running_stats=True),
            "group": nn.GroupNorm(1, 2),
        }
    )
    assert batch_normalised(module) == ["batch", "without", "sync"]
    assert batch_normalised(module, prefix="a") == ["a.batch", "a.without", "a.sync"]
