"""split_backward and sequential_backward on a user's own modules."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import AwkwardTrunk, RandomState, assert_equal_states, gradients_of, seed_everything
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mtaccum import (
    ConfigError,
    Engine,
    FeatureError,
    InplaceError,
    MultiTaskModel,
    TaskError,
    sequential_backward,
    split_backward,
)


class Net(nn.Module):
    """A user's own network: a trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
        self.seg = nn.Linear(5, 4)
        self.depth = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


X = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(7) % 4


def losses_of(model: Net) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "seg": lambda f: F.cross_entropy(model.seg(f), Y),
        "depth": lambda f: model.depth(f).abs().mean(),
    }


def assert_same_gradients(one: nn.Module, other: nn.Module, *, tolerance: float = 1e-12) -> None:
    own, expected = gradients_of(one), gradients_of(other)
    assert own.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (own[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(own[name], gradient, rtol=tolerance, atol=tolerance * 1e-2)


# --- independent models -----------------------------------------------------------------------------------


def two_models() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
            "b": nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 4)),
        }
    )


def two_losses(models: nn.ModuleDict) -> dict[str, Callable[[], Tensor]]:
    x = X.float()
    return {
        "a": lambda: models["a"](x).pow(2).mean(),
        "b": lambda: F.cross_entropy(models["b"](x), Y),
    }


def test_two_models_with_one_optimizer_step_bitwise_as_with_the_sum() -> None:
    by_hand, ours = two_models(), two_models()
    steps = []
    for models, run in (
        (by_hand, lambda losses: (losses["a"]() + losses["b"]()).backward()),
        (ours, sequential_backward),
    ):
        optimizer = torch.optim.Adam(models.parameters(), lr=0.1)
        for _ in range(3):
            run(two_losses(models))
            gradients = gradients_of(models)
            optimizer.step()
            optimizer.zero_grad()
        steps.append(gradients)
    assert_equal_states(steps[0], steps[1])
    assert_equal_states(by_hand.state_dict(), ours.state_dict())


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_an_engine_without_a_trunk_is_bitwise_the_sum_too(schedule: str) -> None:
    from helpers import Squared

    class Entropy(Squared):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return F.cross_entropy(prediction, batch["y"])

    by_hand, ours = two_models(), two_models()
    losses = two_losses(by_hand)
    (losses["a"]() + losses["b"]()).backward()
    model = MultiTaskModel(None, {"a": Squared(ours["a"]), "b": Entropy(ours["b"], "y")}, inputs="x")
    Engine(model, schedule=schedule).accumulate([{"x": X.float(), "y": Y}])
    assert_equal_states(gradients_of(ours), gradients_of(by_hand))
    assert_equal_states(dict(ours.named_buffers()), dict(by_hand.named_buffers()))


def test_losses_come_back_detached_and_before_weighting() -> None:
    losses = sequential_backward(two_losses(models := two_models()), weights={"a": 0.25})
    expected = {name: loss() for name, loss in two_losses(two_models()).items()}
    assert losses == expected
    assert list(losses) == ["a", "b"]
    assert not any(loss.requires_grad for loss in losses.values())
    unweighted = two_models()
    sequential_backward(two_losses(unweighted))
    assert torch.equal(models["a"][0].weight.grad * 4, unweighted["a"][0].weight.grad)
    assert torch.equal(models["b"][0].weight.grad, unweighted["b"][0].weight.grad)


# --- a shared trunk ---------------------------------------------------------------------------------------


def joint(weights: dict[str, float]) -> Net:
    model = net()
    features = model.trunk(X)
    sum(weights.get(name, 1.0) * loss(features) for name, loss in losses_of(model).items()).backward()
    return model


@pytest.mark.parametrize("given", ["features", "function", "recompute"])
@pytest.mark.parametrize("weights", [{}, {"depth": 0.5}, {"seg": 3.0, "depth": 1e-3}])
def test_gradients_equal_those_of_the_sum(given: str, weights: dict[str, float]) -> None:
    model = net()
    features = model.trunk(X) if given == "features" else (lambda: model.trunk(X))
    losses = split_backward(features, losses_of(model), weights=weights, recompute=given == "recompute")
    assert_same_gradients(model, joint(weights))
    reference = {name: loss(model.trunk(X)).item() for name, loss in losses_of(model).items()}
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(reference, rel=1e-12)


def test_gradients_add_to_what_is_there() -> None:
    model = net()
    for _ in range(2):
        split_backward(model.trunk(X), losses_of(model))
    expected = joint({})
    for parameter in expected.parameters():
        parameter.grad *= 2
    assert_same_gradients(model, expected)


def test_a_loss_of_weight_0_is_not_run() -> None:
    model, ran = net(), []
    losses = {**losses_of(model), "idle": lambda f: ran.append(1) or f.sum()}
    done = split_backward(model.trunk(X), losses, weights={"idle": 0.0})
    assert ran == []
    assert set(done) == {"seg", "depth"}
    assert_same_gradients(model, joint({}))
    assert split_backward(model.trunk(X), {"idle": losses["idle"]}, weights={"idle": 0}) == {}


def test_a_loss_may_be_a_dict_of_terms() -> None:
    model = net()
    losses = losses_of(model)
    both = {"both": lambda f: {"seg": losses["seg"](f), "depth": losses["depth"](f)}}
    done = split_backward(model.trunk(X), both)
    assert done["both"].dim() == 0
    assert_same_gradients(model, joint({}))


def test_features_may_be_nested_and_need_no_gradient() -> None:
    torch.manual_seed(0)
    trunk, head = AwkwardTrunk().double(), nn.Linear(4, 2).double()
    trunk.requires_grad_(False)
    image = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    split_backward(trunk(image), {"a": lambda f: head(f["pooled"].vector).sum() * f["pooled"].level})
    assert head.weight.grad is not None
    assert all(parameter.grad is None for parameter in trunk.parameters())


def test_backward_gets_each_weighted_loss_once() -> None:
    model, given = net(), []

    def backward(loss: Tensor) -> None:
        given.append(loss.item())
        loss.backward()

    losses = split_backward(model.trunk(X), losses_of(model), weights={"depth": 0.5}, backward=backward)
    assert given == [losses["seg"].item(), 0.5 * losses["depth"].item()]


def test_the_next_loss_starts_after_the_backward_of_the_one_before() -> None:
    model, order = net(), []
    losses = losses_of(model)
    watched = {name: lambda f, name=name: order.append(name) or losses[name](f) for name in losses}
    split_backward(model.trunk(X), watched, backward=lambda loss: order.append("backward") or loss.backward())
    assert order == ["seg", "backward", "depth", "backward"]
    order.clear()
    watched = {name: lambda name=name: order.append(name) or losses[name](model.trunk(X)) for name in losses}
    sequential_backward(watched, backward=lambda loss: order.append("backward") or loss.backward())
    assert order == ["seg", "backward", "depth", "backward"]


def test_a_loss_that_rearranges_its_features_changes_nothing_for_others_b2() -> None:
    model, expected = net(), net()

    def pops(f: dict[str, list[Tensor]]) -> Tensor:
        f["maps"].append(model.seg(f["maps"].pop()))
        return F.cross_entropy(f["maps"].pop(), Y)

    features = {"maps": [model.trunk(X)]}
    split_backward(features, {"seg": pops, "depth": lambda f: model.depth(f["maps"][0]).abs().mean()})

    f = expected.trunk(X)
    (F.cross_entropy(expected.seg(f), Y) + expected.depth(f).abs().mean()).backward()
    assert_same_gradients(model, expected)
    assert len(features["maps"]) == 1


# --- recompute --------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """A trunk that changes and draws everything that a second run could see: BatchNorm, dropout, spectral
    norm, random numbers of NumPy and Python, an in-place op, and its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, padding=1))
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.4)
        self.linear = nn.utils.spectral_norm(nn.Linear(4, 4))  # the older one, that sets an attribute
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, image: Tensor) -> dict[str, Any]:
        self.passes += 1
        x = self.dropout(F.relu(self.norm(self.conv(image)), inplace=True))
        noise = torch.from_numpy(np.random.standard_normal(tuple(x.shape))).to(x)
        x = (x + noise) * (1 + random.random()) * self.passes
        return {"map": x, "vector": (self.linear(x.mean((2, 3))), 3, None)}


def restless() -> tuple[nn.ModuleDict, Tensor]:
    torch.manual_seed(0)
    nets = nn.ModuleDict(
        {"trunk": Restless(), "a": nn.Conv2d(4, 2, 1), "b": nn.Linear(4, 2), "drop": nn.Dropout(0.5)}
    )
    return nets.double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)


def restless_step(
    recompute: bool, wrapped: bool = False
) -> tuple[nn.ModuleDict, list[Any], RandomState, list[float]]:
    nets, image = restless()
    seed_everything(4)
    random.seed(4)
    outputs: list[Tensor] = []
    nets["trunk"].conv.register_forward_hook(lambda _m, _i, output: outputs.append(output.detach().clone()))

    def trunk() -> Any:
        return nets["trunk"](image.clone() if wrapped else image)

    split_backward(
        trunk,
        {
            "a": lambda f: nets["drop"](nets["a"](f["map"])).pow(2).mean(),
            "b": lambda f: nets["b"](f["vector"][0]).pow(2).mean() * f["vector"][1] * (1 + random.random()),
        },
        recompute=recompute,
    )
    return nets, outputs, RandomState(), [random.random() for _ in range(3)]


def test_recompute_leaves_gradients_buffers_and_random_numbers_as_one_run_does_s1_s3() -> None:
    once, outputs_once, state_once, python_once = restless_step(recompute=False)
    twice, outputs_twice, state_twice, python_twice = restless_step(recompute=True)

    assert (len(outputs_once), len(outputs_twice)) == (1, 2)
    for output in outputs_twice:
        assert torch.equal(output, outputs_once[0])
    assert_equal_states(gradients_of(twice), gradients_of(once))
    assert_equal_states(dict(twice.named_buffers()), dict(once.named_buffers()))
    assert once["trunk"].passes.item() == 1
    assert once["trunk"].norm.num_batches_tracked.item() == 1
    assert state_twice == state_once
    assert python_twice == python_once


def test_recompute_equals_the_sum_by_hand() -> None:
    twice, *_ = restless_step(recompute=True)
    nets, image = restless()
    seed_everything(4)
    random.seed(4)
    f = nets["trunk"](image)
    a = nets["drop"](nets["a"](f["map"])).pow(2).mean()
    b = nets["b"](f["vector"][0]).pow(2).mean() * 3 * (1 + random.random())
    (a + b).backward()
    assert_same_gradients(twice, nets)


def test_recompute_works_where_the_inputs_need_no_gradient_b5() -> None:
    model = net()
    split_backward(lambda: model.trunk(X), losses_of(model), recompute=True)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_recompute_keeps_no_graph_while_the_heads_run() -> None:
    model, saved = net(), []
    inside: list[weakref.ref[Tensor]] = []
    model.trunk[0].register_forward_hook(lambda _m, _i, output: inside.append(weakref.ref(output)))
    losses = {
        name: lambda f, loss=loss: saved.append([r() for r in inside]) or loss(f)
        for name, loss in losses_of(model).items()
    }
    split_backward(lambda: model.trunk(X), losses, recompute=True)
    assert len(inside) == 2, "it was to run again"
    assert saved == [[None]] * len(losses), "something of the trunk was alive while a head ran"


def test_recompute_does_not_repeat_a_trunk_run_by_its_children() -> None:
    # as backbone.forward_features(x) of timm: the module itself is not called, its children are
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)
            self.norm = nn.BatchNorm1d(5)

        def forward_features(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x))

    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = Net().double()
        split_backward(
            lambda net=net: net.forward_features(X),
            {"a": lambda f: f.pow(3).sum()},
            recompute=recompute,
        )
        results.append(net)
    assert_equal_states(gradients_of(results[0]), gradients_of(results[1]))
    assert_equal_states(dict(results[0].named_buffers()), dict(results[1].named_buffers()))


def test_recompute_leaves_no_hook_behind_also_after_an_error() -> None:
    model = net()
    before = dict(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(TaskError):
        split_backward(lambda: model.trunk(X), {"a": lambda f: f @ f}, recompute=True)
    with pytest.raises(RuntimeError):
        split_backward(lambda: model.trunk(X[:, :2]), losses_of(model), recompute=True)
    assert nn.modules.module._global_forward_pre_hooks == before


# --- what is refused --------------------------------------------------------------------------------------


def test_recompute_needs_a_function() -> None:
    with pytest.raises(ConfigError, match=r"recompute=True needs a function.*lambda: net\.backbone"):
        split_backward(net().trunk(X), {"a": lambda f: f.sum()}, recompute=True)


@pytest.mark.parametrize("losses", [{}, None, [lambda f: f.sum()]])
@pytest.mark.parametrize("call", [lambda losses: split_backward(X, losses), sequential_backward])
def test_no_losses_are_refused(call: Any, losses: Any) -> None:
    with pytest.raises(ConfigError, match="dict with at least one task"):
        call(losses)


def test_a_loss_that_ran_already_is_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"loss of 'seg' is a Tensor.*lambda f: "):
        split_backward(model.trunk(X), {"seg": model.seg(model.trunk(X)).sum()})
    with pytest.raises(ConfigError, match=r"loss of 'seg' is a Tensor.*lambda: "):
        sequential_backward({"seg": model.seg(model.trunk(X)).sum()})


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_can_not_be_are_refused_by_name(weight: float) -> None:
    model = net()
    for call in (
        lambda: split_backward(model.trunk(X), losses_of(model), weights={"seg": weight}),
        lambda: sequential_backward({"seg": lambda: model(X)}, weights={"seg": weight}),
    ):
        with pytest.raises(ConfigError, match="the weight of 'seg' must be a finite number of at least 0"):
            call()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_of_unknown_tasks_are_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"unknown task in weights 'dpeth'\. Did you mean 'depth'\?"):
        split_backward(model.trunk(X), losses_of(model), weights={"dpeth": 1.0})


class Wrapped:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_features_of_an_unknown_type_are_refused_by_name() -> None:
    with pytest.raises(FeatureError, match="Wrapped.*register_structure"):
        split_backward(Wrapped(net().trunk(X)), {"a": lambda f: f.tensor.sum()})


@pytest.mark.parametrize(
    "outside",
    [("seg", "depth"), ("seg",), ("depth",)],
    ids=["both", "the first", "the last"],
)
def test_using_the_variable_outside_is_explained(outside: tuple[str, ...]) -> None:
    model = net()
    features = model.trunk(X)
    losses = losses_of(model)
    given = {
        name: (lambda _, name=name: losses[name](features)) if name in outside else losses[name]
        for name in losses
    }
    with pytest.raises(TaskError, match=r"Compute each loss from the features passed to its function"):
        split_backward(features, given)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_writing_into_the_features_is_refused_by_name_b2(frozen: bool, recompute: bool) -> None:
    model = net()
    model.trunk.requires_grad_(not frozen)
    losses = {"seg": losses_of(model)["seg"], "bad": lambda f: F.relu_(f).sum()}
    with pytest.raises(InplaceError, match=r"'bad' writes in place.*nn\.ReLU\(\)"):
        split_backward(lambda: model.trunk(X), losses, recompute=recompute)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(lambda f: f, r"Tensor\(7, 5\)"), (lambda f: {}, "empty dict"), (lambda f: "3", "str")],
)
def test_a_loss_that_is_no_single_number_names_the_task(loss: Any, shown: str) -> None:
    with pytest.raises(TaskError, match=f"task 'seg'.*{shown}"):
        split_backward(net().trunk(X), {"seg": loss})


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError, AssertionError])
def test_a_head_that_fails_names_the_task(error: type[Exception]) -> None:
    def fail(_: Any) -> Tensor:
        raise error("inside")

    with pytest.raises(TaskError, match="task 'seg'.*inside"):
        split_backward(net().trunk(X), {"seg": fail})


def test_an_error_of_the_trunk_is_its_own() -> None:
    model = copy.deepcopy(net())
    with pytest.raises(RuntimeError, match="shapes"):
        split_backward(lambda: model.trunk(X[:, :2]), losses_of(model))


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_around_the_call_loses_no_gradient_of_the_trunk(recompute: bool) -> None:
    """Autocast caches cast weights; those cast while there was no graph lead nowhere."""
    trunk, head = nn.Linear(4, 8), nn.Linear(8, 3)
    x = torch.rand(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(head(trunk(x)).float(), torch.arange(5) % 3).backward()
        expected = trunk.weight.grad
        trunk.weight.grad = head.weight.grad = None
        assert expected is not None
        torch.clear_autocast_cache()
        split_backward(
            lambda: trunk(x),
            {"a": lambda f: F.cross_entropy(head(f).float(), torch.arange(5) % 3)},
            recompute=recompute,
        )
    torch.testing.assert_close(trunk.weight.grad, expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_that_is_none_learns_nothing_and_the_others_do(recompute: bool) -> None:
    model, other = net(), net()
    losses, reference = losses_of(model), losses_of(other)
    found = split_backward(lambda: model.trunk(X), {**losses, "seg": lambda f: None}, recompute=recompute)
    del reference["seg"]
    split_backward(lambda: other.trunk(X), reference, recompute=recompute)

    assert set(found) == set(reference)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.equal(one.grad, two.grad)


def test_without_gradients_it_is_refused() -> None:
    model = net()
    with torch.no_grad(), pytest.raises(ConfigError, match="no_grad"):
        split_backward(model.trunk(X), losses_of(model))
