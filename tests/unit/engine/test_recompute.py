"""Recompute: segments that keep no graph give the same gradients, buffers and random numbers for less."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SCHEDULE_NAMES,
    Failing,
    RandomState,
    Squared,
    assert_close_gradients,
    assert_equal_states,
    awkward_batch,
    awkward_model,
    gradients_of,
    joint_reference,
    seed_everything,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations

from mtaccum import Engine, InplaceError, MultiTaskModel, TaskError
from mtaccum.engine.recompute import recomputed
from mtaccum.memory import measure_peak

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
pytestmark = [
    pytest.mark.filterwarnings("error:recompute"),
    pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay"),
]


@dataclass
class Outcome:
    """What a window leaves behind."""

    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    losses: dict[str, Tensor]
    random: RandomState
    python: Any


def outcome(
    model: MultiTaskModel, window: list[Any], schedule: str, recompute: Sequence[str] = (), **settings: Any
) -> Outcome:
    """Of a window on a copy of the model, from a fixed seed."""
    model = copy.deepcopy(model)
    seed_everything(3)
    random.seed(3)
    result = Engine(model, schedule=schedule, recompute=recompute, **settings).accumulate(window)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(gradients_of(model), buffers, dict(result.losses), RandomState(), random.getstate())


def assert_same(one: Outcome, other: Outcome) -> None:
    """Bit for bit."""
    assert_equal_states(one.losses, other.losses)
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        theirs = other.gradients[name]
        assert (gradient is None) == (theirs is None), name
        assert gradient is None or torch.equal(gradient, theirs), name
    assert_equal_states(one.buffers, other.buffers)
    assert one.random == other.random
    assert one.python == other.python


# --- the same as without ----------------------------------------------------------------------------------

AWKWARD_SEGMENTS = {
    "the trunk": ["trunk"],
    "layers of the trunk": ["trunk.conv", "trunk.norm", "trunk.dropout"],
    "the trunk and layers of it": ["trunk", "trunk.conv", "trunk.norm"],
    "necks": ["fpn", "deep.layer", "deep.dropout"],
    "a module used twice": ["depth.conv", "depth.norm"],
    "spectral norm, NumPy and no parameters": ["cls", "noisy", "bare"],
    "tied weights": ["left.layer", "right"],
    "all nodes": ["*"],
    "all nodes and all layers": ["*", "*.*"],
}


@pytest.mark.parametrize("segments", AWKWARD_SEGMENTS.values(), ids=AWKWARD_SEGMENTS)
@schedules
def test_an_awkward_model_is_trained_the_same_bit_for_bit_s1_s3(schedule: str, segments: list[str]) -> None:
    model, window = awkward_model(), [awkward_batch(3), awkward_batch(2, seed=2)]
    window[1]["cls"].fill_(-100)
    assert_same(outcome(model, window, schedule, segments), outcome(model, window, schedule))


@pytest.mark.parametrize("mode", ["frozen", "detached"])
@pytest.mark.parametrize("task", ["seg", "depth", "cls", "noisy", "left"])
@schedules
def test_tasks_of_any_mode_may_have_segments_inside_b3(schedule: str, task: str, mode: str) -> None:
    model, window = awkward_model(), [awkward_batch(3), awkward_batch(2, seed=2)]
    model.task(task).mode = mode
    segments = ["trunk.norm", "fpn", "deep", task, f"{task}.*"]
    assert_same(outcome(model, window, schedule, segments), outcome(model, window, schedule))


@pytest.mark.parametrize("node", ["trunk", "fpn", "depth"])
@schedules
def test_frozen_nodes_may_have_segments_inside_b4(schedule: str, node: str) -> None:
    model, window = awkward_model(), [awkward_batch(3), awkward_batch(2, seed=2)]
    model.own_modules()[node].requires_grad_(False)
    segments = ["trunk", "trunk.conv", "fpn.norm", "depth", "depth.norm"]
    assert_same(outcome(model, window, schedule, segments), outcome(model, window, schedule))


class Noise(nn.Module):
    """Noise of all three generators; NumPy's and Python's choose how much."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * float(np.random.rand()) * random.random()


class Block(nn.Module):
    """A residual block with everything that a second run could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.4)
        self.noise = Noise()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise(self.dropout(torch.tanh(self.norm(self.spectral(x)))))


def blocks_model() -> MultiTaskModel:
    """Blocks in Sequentials, one of them standing twice, on two levels."""
    torch.manual_seed(0)
    twice = Block()
    trunk = nn.Sequential(
        nn.Linear(3, 4),
        nn.Sequential(Block(), twice, nn.Sequential(Block(), nn.Tanh()), Block()),
        nn.ReLU(inplace=True),
    )
    trunk.add_module("again", twice)
    heads = {"a": nn.Sequential(Block(), nn.Linear(4, 2), Noise()), "b": nn.Sequential(nn.Linear(4, 2))}
    return MultiTaskModel(trunk, {n: Squared(h) for n, h in heads.items()}, inputs="x").double()


BLOCK_SEGMENTS = {
    "a run": ["trunk[0:2]"],
    "two runs": ["trunk.1[0:2]", "trunk.1[2:4]"],
    "single children": ["trunk[0]", "trunk[-1]", "trunk.1[1]"],
    "the middle": ["trunk[1:3]"],
    "runs in runs": ["trunk[0:3]", "trunk.1[1:3]", "trunk.1.2[0:1]"],
    "a run and the whole": ["trunk", "trunk[1:4]", "trunk.1"],
    "a run and what is in it": ["trunk.1[0:3]", "trunk.1.0", "trunk.1.0.norm", "trunk.1.2.0.noise"],
    "what stands twice": ["trunk.again"],
    "patterns": ["trunk.1.*", "?.0", "trunk.*.*.*"],
    "heads": ["a[0:2]", "a.0.dropout", "b"],
}


@pytest.mark.parametrize("segments", BLOCK_SEGMENTS.values(), ids=BLOCK_SEGMENTS)
@schedules
def test_runs_of_children_are_trained_the_same_bit_for_bit_s1_s3(schedule: str, segments: list[str]) -> None:
    window = [{"x": torch.randn(n, 3, dtype=torch.float64)} for n in (4, 3)]
    model = blocks_model()
    assert_same(outcome(model, window, schedule, segments), outcome(model, window, schedule))


@schedules
def test_a_child_that_stands_twice_in_a_sequential_runs_twice(schedule: str) -> None:
    torch.manual_seed(0)
    act, layer = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 4)
    trunk = nn.Sequential(nn.Linear(3, 4), act, layer, act, layer)
    tasks = {"a": Squared(nn.Linear(4, 2)), "b": Squared(nn.Linear(4, 1))}
    model = MultiTaskModel(trunk, tasks, inputs="x").double()
    window = [{"x": torch.randn(4, 3, dtype=torch.float64)}]
    without = outcome(model, window, schedule)
    for segments in (["trunk[0:2]"], ["trunk[3:5]"], ["trunk[1:4]"], ["trunk[:]"], ["trunk[0]", "trunk[4]"]):
        assert_same(outcome(model, window, schedule, segments), without)


@dataclass
class Pair:
    left: Tensor
    right: Tensor
    scale: float = 1.0


class Fussy(nn.Module):
    """Nested inputs and keyword arguments, among them those that checkpoint functions have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(
        self,
        pair: Pair,
        nest: dict[str, Any],
        /,
        *more: Tensor,
        mask: Tensor,
        function: Tensor | None = None,
        module: Tensor | None = None,
        debug: float = 1.0,
        early_stop: float = 1.0,
        use_reentrant: float = 1.0,
        preserve_rng_state: float = 1.0,
        context_fn: float = 1.0,
        determinism_check: float = 1.0,
    ) -> dict[str, Any]:
        x = self.layer(pair.left) * pair.scale + pair.right * mask + nest["list"][0] * nest["n"]
        for tensor in (*more, function, module):
            x = x if tensor is None else x + tensor
        x = x * debug * early_stop * use_reentrant * preserve_rng_state * context_fn * determinism_check
        return {"pair": Pair(x, x.exp(), 2.0), "tuple": (x, 3, None)}


class FussyTrunk(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.first, self.fussy = nn.Linear(3, 3), Fussy()
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        named = {name: y if value == "tensor" else value for name, value in self.settings.items()}
        out = self.fussy(Pair(y, x, scale=0.5), {"list": [y, x], "n": 2}, y, x, mask=(x > 0.5).to(x), **named)
        return out["pair"].left + out["pair"].right * out["pair"].scale + out["tuple"][0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"function": "tensor", "module": "tensor"},
        {"debug": 2.0},
        {"early_stop": 0.0},
        {"use_reentrant": 3.0},
        {"preserve_rng_state": 4.0},
        {"context_fn": 5.0, "determinism_check": 6.0},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_nested_and_named_arguments_arrive_as_they_are(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    tasks = {"a": Squared(nn.Linear(3, 1)), "b": Squared(nn.Linear(3, 2))}
    model = MultiTaskModel(FussyTrunk(**settings), tasks, inputs="x").double()
    window = [{"x": torch.rand(4, 3, dtype=torch.float64)}]
    assert_same(outcome(model, window, "split", ["trunk.fussy"]), outcome(model, window, "split"))


class Attending(nn.Module):
    """Attention of the features to themselves: PyTorch's goes another way if query, key and value are one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x)[0]
        return output


@schedules
def test_one_tensor_in_several_places_is_one_when_a_segment_runs_again(schedule: str) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 4), Attending())
    heads = {name: Squared(nn.Linear(4, 1), target=None) for name in ("a", "b")}
    model = MultiTaskModel(trunk, heads, inputs="x").double()
    window = [{"x": torch.randn(2, 3, 4, dtype=torch.float64)}]
    segments = ["trunk.1.attention"]
    assert_same(outcome(model, window, schedule, segments), outcome(model, window, schedule))


@schedules
def test_a_node_with_several_named_inputs_may_be_recomputed(schedule: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(5, 3), nn.Linear(3, 3)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.layer(self.words(ids)) * mask[:, None]

    torch.manual_seed(0)
    tasks = {"a": Squared(nn.Linear(3, 1)), "b": Squared(nn.Linear(3, 2))}
    model = MultiTaskModel(Two(), tasks, inputs=["ids", "mask"]).double()
    window = [{"ids": torch.tensor([1, 2, 4]), "mask": torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)}]
    for segments in (["trunk"], ["trunk.words", "trunk.layer"]):
        assert_same(outcome(model, window, schedule, segments), outcome(model, window, schedule))


@schedules
def test_the_first_layer_learns_though_its_input_needs_no_gradient_b5(schedule: str) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(4, 1))}, inputs="x").double()
    batch = {"x": torch.rand(5, 3, dtype=torch.float64)}
    reference = joint_reference(model, [batch])
    assert reference.gradients["trunk.0.weight"].norm() > 0
    for segments in (["trunk"], ["trunk.0"], ["trunk[0:2]"]):
        model.zero_grad()
        Engine(model, schedule=schedule, recompute=segments).accumulate([batch])
        assert_close_gradients(model, reference, 1e-12)


@pytest.mark.parametrize("segments", [["a.0"], ["b.0"], ["a", "b"], ["a.0", "a.1", "b"]], ids=" ".join)
@pytest.mark.parametrize("mode", ["train", "frozen", "detached"])
@schedules
def test_a_module_that_two_heads_share_may_be_a_segment_b3(
    schedule: str, mode: str, segments: list[str]
) -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
    heads = {name: nn.Sequential(shared, nn.Linear(4, 2)) for name in "ab"}
    tasks = {"a": Squared(heads["a"], mode=mode), "b": Squared(heads["b"])}
    model = MultiTaskModel(nn.Linear(3, 4), tasks, inputs="x").double()
    window = [{"x": torch.randn(n, 3, dtype=torch.float64)} for n in (4, 3)]
    assert_same(outcome(model, window, schedule, segments), outcome(model, window, schedule))


@schedules
def test_hooks_on_a_segment_stay_in_force(schedule: str) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)))
    trunk[1].register_forward_pre_hook(lambda _, args: args[0] * 2)
    trunk[1].register_forward_hook(lambda _, args, output: output + args[0])
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(4, 1))}, inputs="x").double()
    window = [{"x": torch.rand(4, 3, dtype=torch.float64)}]
    without = outcome(model, window, schedule)
    for segments in (["trunk.1"], ["trunk"], ["trunk[1]"]):
        assert_same(outcome(model, window, schedule, segments), without)
    trunk[1]._forward_hooks.clear()
    assert not torch.equal(outcome(model, window, schedule).losses["a"], without.losses["a"])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@schedules
def test_weights_that_hooks_make_are_made_again_s1(schedule: str) -> None:
    # the older forms of weight and spectral norm, whose buffers take a step in each pass
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh()
    )
    tasks = {"a": Squared(nn.utils.spectral_norm(nn.Linear(4, 1))), "b": Squared(nn.Linear(4, 2))}
    model = MultiTaskModel(trunk, tasks, inputs="x").double()
    window = [{"x": torch.rand(n, 3, dtype=torch.float64)} for n in (4, 3)]
    seed_everything(3)
    without = run_of(model, window, schedule, [])
    for segments in (["trunk.0", "trunk.2", "a"], ["trunk"], ["trunk[0:3]"]):
        one = run_of(model, window, schedule, segments)
        assert_equal_states(one[0], without[0])
        assert_equal_states(one[1], without[1])


def run_of(
    model: MultiTaskModel, window: list[Any], schedule: str, segments: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and buffers of a window, on a model that can't be copied, which is left as it was."""
    before = copy.deepcopy(model.state_dict())
    Engine(model, schedule=schedule, recompute=segments).accumulate(window)
    gradients, buffers = gradients_of(model), {n: b.clone() for n, b in model.named_buffers()}
    model.load_state_dict(before)
    model.zero_grad()
    return gradients, buffers


@schedules
def test_randomness_that_an_operation_fills_in_late_is_replayed_s3(schedule: str) -> None:
    # RReLU hands its slopes on before it draws them
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.RReLU(), nn.Linear(4, 4), nn.RReLU())
    tasks = {"a": Squared(nn.Linear(4, 2)), "b": Squared(nn.Sequential(nn.Linear(4, 2), nn.RReLU()))}
    model = MultiTaskModel(trunk, tasks, inputs="x").double()
    for segments in (["trunk"], ["trunk[0:2]", "trunk[2:4]"], ["trunk.1", "trunk.3", "b"]):
        assert_same(outcome(model, [X], schedule, segments), outcome(model, [X], schedule))


@schedules
def test_a_recomputed_dropout_drops_the_same_and_draws_nothing_s3(schedule: str) -> None:
    seen: list[Tensor] = []
    dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(lambda _, __, output: seen.append(output.detach() == 0))
    trunk = nn.Sequential(nn.Linear(3, 64), dropout, nn.Tanh())
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(64, 1))}, inputs="x")
    window = [{"x": torch.rand(4, 3)}]
    torch.manual_seed(0)
    kept = F.dropout(torch.ones(4, 64), 0.5) == 0
    after = RandomState()
    torch.manual_seed(0)
    Engine(model, schedule=schedule, recompute=["trunk"]).accumulate(window)
    assert RandomState() == after
    assert len(seen) == 2
    assert all(torch.equal(mask, kept) for mask in seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("segments", [["trunk"], ["trunk[1:4]", "a"], ["trunk", "trunk.2"]], ids=" ".join)
@schedules
def test_what_a_gpu_draws_is_drawn_again_s3(schedule: str, segments: list[str]) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Tanh())
    heads = {name: nn.Sequential(nn.Dropout(0.3), nn.Linear(64, 2)) for name in "ab"}
    model = MultiTaskModel(trunk, {n: Squared(h) for n, h in heads.items()}, inputs="x").double().cuda()
    window = [{"x": torch.randn(n, 3, dtype=torch.float64)} for n in (8, 5)]
    results, states = [], []
    for recompute in ([], segments):
        results.append(outcome(model, window, schedule, recompute))
        states.append(torch.cuda.get_rng_state())
    for name, gradient in results[0].gradients.items():
        torch.testing.assert_close(results[1].gradients[name], gradient, rtol=1e-12, atol=1e-14)
    assert_equal_states(results[1].buffers, results[0].buffers)
    assert torch.equal(*states)


@schedules
def test_running_statistics_move_once_per_pass_s1(schedule: str) -> None:
    model = awkward_model()
    Engine(model, schedule=schedule, recompute=["*", "*.norm"]).accumulate([awkward_batch(3)] * 2)
    tracked = {n: int(b) for n, b in model.named_buffers() if n.endswith("num_batches_tracked")}
    assert tracked == {
        "trunk.norm.num_batches_tracked": 2,
        "necks.fpn.module.norm.num_batches_tracked": 2,
        "tasks.depth.head.norm.num_batches_tracked": 4,  # used twice
    }


@schedules
def test_a_training_with_recompute_is_the_training_without(schedule: str) -> None:
    states = []
    for segments in ((), ("trunk", "trunk.conv", "fpn", "depth.norm", "noisy")):
        model = awkward_model()
        seed_everything(5)
        engine = Engine(
            model,
            torch.optim.Adam(model.parameters()),
            schedule=schedule,
            recompute=segments,
            max_grad_norm=1.0,
        )
        for step in range(3):
            engine.step([awkward_batch(3, seed=step), awkward_batch(2, seed=step + 9)])
        states.append(copy.deepcopy(model.state_dict()))
    assert_equal_states(*states)


# --- what can't run again ---------------------------------------------------------------------------------


class Double(nn.Module):
    """Needs neither its input nor its output for its backward; takes a tensor or a list with one."""

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        return (x[0] if isinstance(x, list) else x) * 2


class Writes(nn.Module):
    """A segment, and something that is written into in place."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first = nn.Linear(3, 4)
        start = nn.ReLU(inplace=True) if where == "inside" else Double()
        self.segment = nn.Sequential(start, nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "before":
            x.relu_()
        given = {"a copy": x.clone(), "after, by a view": x[:], "after, in a list": [x]}.get(self.where, x)
        y = self.segment(given)
        if self.where.startswith("after") or self.where == "a copy":
            x.add_(1)
        if self.where == "output":
            y.relu_()
        return y


def writes_model(where: str) -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {"a": Squared(nn.Linear(4, 1)), "b": Squared(nn.Linear(4, 2))}
    return MultiTaskModel(Writes(where), tasks, inputs="x").double()


X = {"x": torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("where", ["before", "output", "a copy"])
@schedules
def test_writing_into_what_is_no_input_of_a_segment_is_fine(schedule: str, where: str) -> None:
    model = writes_model(where)
    assert_same(outcome(model, [X], schedule, ["trunk.segment"]), outcome(model, [X], schedule))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("inside", r"'trunk\.segment' writes in place into its inputs, so it can't be run again"),
        ("after", r"'trunk\.segment' has inputs that were written into after it ran, so it can't be run"),
        ("after, by a view", r"'trunk\.segment' has inputs that were written into after"),
        ("after, in a list", r"'trunk\.segment' has inputs that were written into after"),
    ],
    ids=["inside", "after", "after, by a view", "after, in a list"],
)
@schedules
def test_writing_into_the_input_of_a_segment_names_it_and_leaves_nothing_b2(
    schedule: str, where: str, message: str
) -> None:
    model = writes_model(where)
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule, recompute=["trunk.segment"]
    )
    before, attributes = copy.deepcopy(model.state_dict()), attributes_of(model)
    with pytest.raises(InplaceError, match=rf"{message}.*larger segment.*nn\.ReLU\(\)"):
        engine.step([X, X])
    assert_equal_states(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert attributes_of(model) == attributes
    # without, or in a larger segment, it is fine
    assert_same(outcome(model, [X], schedule, ["trunk"]), outcome(model, [X], schedule))


@schedules
def test_a_trunk_that_writes_into_the_batch_can_not_run_again_b2(schedule: str) -> None:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.div_(255))

    model = MultiTaskModel(Scales(3, 2), {"a": Squared(nn.Linear(2, 1))}, inputs="x")
    with pytest.raises(InplaceError, match="'trunk' writes in place into its inputs"):
        Engine(model, schedule=schedule, recompute=["trunk"]).accumulate([{"x": torch.rand(4, 3)}])


@pytest.mark.parametrize("recompute", [["a"], ["a.0"], ["a[0:1]"], ["a.1"]], ids=" ".join)
@schedules
def test_a_head_that_writes_into_the_features_is_named_whatever_is_recomputed_b2(
    schedule: str, recompute: list[str]
) -> None:
    head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1))
    model = MultiTaskModel(nn.Linear(3, 4), {"a": Squared(head), "b": Squared(nn.Linear(4, 1))}, inputs="x")
    with pytest.raises(InplaceError, match=r"'a.*' writes in place into"):
        Engine(model, schedule=schedule, recompute=recompute).accumulate([{"x": torch.rand(4, 3)}])
    assert all(parameter.grad is None for parameter in model.parameters())


@schedules
def test_a_segment_that_does_something_else_when_it_runs_again_is_an_error(schedule: str) -> None:
    class Counts(nn.Module):
        """State that is no buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.runs = nn.Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            for _ in range(self.runs):
                x = torch.cat([x, x]).tanh()
            return self.layer(x)

    tasks = {"a": Squared(nn.Linear(3, 1)), "b": Squared(nn.Linear(3, 1), mode="off")}
    model = MultiTaskModel(Counts(), tasks, inputs="x")
    with pytest.raises(TaskError, match=r"did not do the same when it ran again.*Recompute another segment"):
        Engine(model, schedule=schedule, recompute=["trunk"]).accumulate([{"x": torch.rand(4, 3)}])
    assert all(parameter.grad is None for parameter in model.parameters())


@schedules
def test_a_segment_that_fails_only_when_it_runs_again_says_so(schedule: str) -> None:
    class UsesUp(nn.Module):
        """Takes what it needs, so that it is gone the next time."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scales = nn.Linear(3, 3), [2.0]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scales.pop()

    model = MultiTaskModel(UsesUp(), {"a": Squared(nn.Linear(3, 1))}, inputs="x")
    with pytest.raises(TaskError, match=r"'trunk' failed when it ran again, and had not at first: pop from"):
        Engine(model, schedule=schedule, recompute=["trunk"]).accumulate([{"x": torch.rand(4, 3)}])
    assert all(parameter.grad is None for parameter in model.parameters())


# --- segments that aren't called --------------------------------------------------------------------------


class Attends(nn.Module):
    """PyTorch's attention reads its output layer's weight and doesn't call it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.filterwarnings("default:recompute")
@schedules
def test_a_segment_that_is_not_called_is_warned_of_once(schedule: str) -> None:
    tasks = {"a": Squared(nn.Linear(4, 1), "a"), "b": Squared(Attends(), "b")}
    model = MultiTaskModel(Attends(), tasks, inputs="x")
    names = ["trunk.attention", "trunk.attention.out_proj", "trunk.spare", "b.spare", "a"]
    engine = Engine(model, schedule=schedule, recompute=names)
    batch = {"x": torch.rand(2, 3, 4), "a": torch.ones(2), "b": None}
    with pytest.warns(UserWarning, match="recompute") as caught:
        engine.accumulate([batch, batch])
    assert [str(warning.message).partition(" did not run as a module")[0] for warning in caught] == [
        "recompute: trunk.attention.out_proj, trunk.spare"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.accumulate([batch])
    # b had no labels until now, so nothing was known of it
    with pytest.warns(UserWarning, match=r"^recompute: b\.spare did not run.*Name what its parent calls"):
        engine.accumulate([{**batch, "b": torch.ones(2)}])


@pytest.mark.filterwarnings("default:recompute")
def test_the_warning_points_to_the_line_that_calls_the_engine() -> None:
    model = MultiTaskModel(Attends(), {"a": Squared(nn.Linear(4, 1))}, inputs="x")
    engine = Engine(model, recompute=["trunk.spare"])
    with pytest.warns(UserWarning, match=r"trunk\.spare did not run") as caught:
        engine.accumulate([{"x": torch.rand(2, 3, 4)}])
    assert caught[0].filename == __file__


@schedules
def test_a_segment_without_a_graph_did_run_all_the_same(schedule: str) -> None:
    # a trunk that only a detached task reads has no graph, and nothing to recompute
    tasks = {"a": Squared(nn.Linear(4, 1), mode="detached")}
    model = MultiTaskModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), tasks, inputs="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(model, schedule=schedule, recompute=["trunk", "trunk.0", "trunk[1]"]).accumulate(
            [{"x": torch.rand(4, 3)}]
        )
    assert model.trunk[0].weight.grad is None


# --- the model is left as it was --------------------------------------------------------------------------


def attributes_of(model: nn.Module) -> list[Any]:
    """What may be put upon a module: its attributes by name, its own forward, its hooks."""
    return [
        (list(vars(module)), vars(module).get("forward"), dict(module._forward_hooks))
        for module in model.modules()
    ]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), torch.OutOfMemoryError()])
@pytest.mark.parametrize("where", ["forward", "recomputed forward", "backward"])
@schedules
def test_forwards_are_the_modules_own_again_after_any_error_g7(
    schedule: str, where: str, error: BaseException
) -> None:
    runs = [0]

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            runs[0] += 1
            # with `sequential` the second task's forward of the trunk comes before a backward's
            if where == "forward" or (where == "recomputed forward" and runs[0] > 1):
                raise error
            if where == "backward":
                x.register_hook(lambda _: (_ for _ in ()).throw(error))
            return x.tanh()

    model = MultiTaskModel(
        nn.Sequential(nn.Linear(3, 4), Breaks(), nn.Linear(4, 4)), {"a": Squared(nn.Linear(4, 1))}, inputs="x"
    )
    mine: Callable[[Tensor], Tensor] = lambda x: F.linear(x, model.trunk[2].weight)  # noqa: E731
    model.trunk[2].forward = mine
    before = attributes_of(model)
    engine = Engine(model, schedule=schedule, recompute=["trunk", "trunk.*", "trunk[0:2]", "a"])
    with pytest.raises((TaskError, RuntimeError, KeyboardInterrupt)):
        engine.accumulate([{"x": torch.rand(4, 3)}])
    assert attributes_of(model) == before
    assert model.trunk[2].forward is mine
    assert all(parameter.grad is None for parameter in model.parameters())


class Compilable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).tanh()


@schedules
def test_a_module_that_its_owner_compiled_may_be_a_segment_and_stays_compiled(schedule: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), Compilable())
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(4, 1))}, inputs="x").double()
    reference = joint_reference(model, [X])
    counter = CompileCounter()
    trunk[1].compile(backend=counter)
    compiled = trunk[1]._compiled_call_impl
    engine = Engine(model, schedule=schedule, recompute=["trunk.1"])
    engine.accumulate([X])
    assert_close_gradients(model, reference, 1e-12)
    assert trunk[1]._compiled_call_impl is compiled
    assert counter.frame_count == 1


@schedules
def test_between_windows_nothing_is_recomputed(schedule: str) -> None:
    model = awkward_model()
    engine = Engine(model, schedule=schedule, recompute=["*", "trunk.conv"])
    before, names = attributes_of(model), list(model.state_dict())
    engine.accumulate([awkward_batch(3)])
    assert attributes_of(model) == before
    assert list(model.state_dict()) == names
    copy.deepcopy(model)  # a forward of ours would not let itself be copied


def test_a_failed_window_leaves_the_next_one_clean_g7() -> None:
    head = Failing(nn.Linear(4, 2), RuntimeError("broken"))
    torch.manual_seed(0)
    tasks = {"a": Squared(nn.Sequential(Block(), nn.Linear(4, 2))), "b": Squared(head)}
    model = MultiTaskModel(nn.Sequential(nn.Linear(3, 4), Block()), tasks, inputs="x").double()
    clean = copy.deepcopy(model)
    clean.task("b").head.broken = False
    segments = ["trunk", "trunk[0:2]", "a.0", "b"]
    one, other = (
        Engine(m, torch.optim.SGD(m.parameters(), lr=0.1), recompute=segments) for m in (model, clean)
    )
    seed_everything(1)
    random.seed(1)
    with pytest.raises(TaskError, match="broken"):
        one.step([X, X])
    head.broken = False
    one.step([X, X])
    seed_everything(1)
    random.seed(1)
    other.step([X, X])
    assert_equal_states(model.state_dict(), clean.state_dict())


# --- a function of one's own ------------------------------------------------------------------------------


def test_a_recomputed_function_runs_once_more_for_its_backward_and_only_then() -> None:
    layer, calls = nn.Linear(2, 2), []
    run = recomputed(lambda x: (calls.append(1), layer(x).exp())[1], layer, "mine")
    with torch.no_grad():
        run(torch.ones(1, 2))
    assert len(calls) == 1
    output = run(torch.ones(1, 2))
    assert len(calls) == 2
    output.sum().backward()
    assert len(calls) == 3
    torch.testing.assert_close(layer.bias.grad, layer(torch.ones(2)).exp())


def test_several_backwards_through_one_segment_run_it_for_each() -> None:
    layer = nn.Linear(2, 2).double()
    x = torch.rand(3, 2, dtype=torch.float64)
    run = recomputed(lambda x: layer(x).exp(), layer, "mine")
    output = run(x)
    output[:, 0].sum().backward(retain_graph=True)
    output[:, 1].sum().backward()
    recomputed_gradient = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).exp().sum().backward()
    torch.testing.assert_close(recomputed_gradient, layer.weight.grad, rtol=1e-14, atol=0)


# --- memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def _without_garbage_collection() -> Iterator[None]:
    """A step must not need the collector to free what it used."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watched(nn.Module):
    """A layer that notes what it makes, weakly: its backward needs the result, so that a graph keeps it."""

    def __init__(self, width: int, alive: list[tuple[str, weakref.ref[Any]]], name: str) -> None:
        super().__init__()
        self.layer, self.alive, self.name = nn.Linear(width, width), alive, name

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x).tanh()
        self.alive.append((self.name, weakref.ref(output.untyped_storage())))
        return output


def watched_model(
    alive: list[tuple[str, weakref.ref[Any]]], depth: int = 4, width: int = 8
) -> MultiTaskModel:
    def stack(name: str) -> nn.Sequential:
        return nn.Sequential(*(Watched(width, alive, name) for _ in range(depth)))

    tasks = {name: Squared(nn.Sequential(stack(name), nn.Linear(width, 1))) for name in ("a", "b")}
    # the trunk's last layer is its features, which live as long as a head may read them
    return MultiTaskModel(nn.Sequential(stack("trunk"), nn.Linear(width, width)), tasks, inputs="x")


@pytest.mark.usefixtures("_without_garbage_collection")
@pytest.mark.parametrize(
    "segments", [["trunk"], ["trunk[:]"], ["trunk", "trunk.0[:2]", "trunk.0.3"]], ids=" ".join
)
@pytest.mark.parametrize("schedule", ["sequential", "split"])
def test_with_the_trunk_recomputed_one_graph_is_alive_at_a_time_g2(
    schedule: str, segments: list[str]
) -> None:
    alive: list[tuple[str, weakref.ref[Any]]] = []
    model = watched_model(alive)
    seen: list[tuple[str, set[str]]] = []

    def graphs() -> set[str]:
        return {name for name, ref in alive if ref() is not None}

    for task in ("a", "b"):
        # as the head's backward begins, and as it ends
        model.task(task).head[1].weight.register_hook(lambda _, t=task: seen.append((f"{t} first", graphs())))
        model.task(task).head[0][0].layer.weight.register_hook(
            lambda _, t=task: seen.append((f"{t} last", graphs()))
        )
    model.trunk[0][-1].layer.weight.register_hook(lambda _: seen.append(("trunk", graphs())))
    Engine(model, schedule=schedule, recompute=segments).accumulate([{"x": torch.rand(4, 8)}])

    heads = [entry for entry in seen if entry[0] != "trunk"]
    assert [name for name, _ in heads] == ["a first", "a last", "b first", "b last"]
    for name, graphs_alive in heads:
        assert graphs_alive <= {name[0]}, "the trunk has no graph while a head has one"
    assert heads[0][1] == {"a"}
    trunks = [graphs_alive for name, graphs_alive in seen if name == "trunk"]
    assert len(trunks) == (2 if schedule == "sequential" else 1)
    for graphs_alive in trunks:
        assert graphs_alive == {"trunk"}, "the heads have none while the trunk has one"
    assert graphs() == set()


@pytest.mark.usefixtures("_without_garbage_collection")
@schedules
def test_without_recompute_the_trunk_s_graph_is_alive_all_along_g2(schedule: str) -> None:
    # so that the test above tells something
    alive: list[tuple[str, weakref.ref[Any]]] = []
    model = watched_model(alive)
    seen: list[set[str]] = []
    for task in ("a", "b"):
        model.task(task).head[1].weight.register_hook(
            lambda _: seen.append({name for name, ref in alive if ref() is not None})
        )
    Engine(model, schedule=schedule).accumulate([{"x": torch.rand(4, 8)}])
    both = [{"trunk", "a", "b"}, {"trunk", "a"}]  # the joint backward begins with the last one
    assert seen == (both if schedule == "summed" else [{"trunk", "a"}, {"trunk", "b"}])


DEPTH, WIDTH, SAMPLES = 8, 16, 256
ACTIVATION = SAMPLES * WIDTH * 4
# the input, the features and their gradient, what a layer's backward takes for a moment, two activations for
# the gradients that come into being, and random state
SPARE = 8 * ACTIVATION


def stack_of(depth: int) -> nn.Sequential:
    """A layer costs one activation: tanh keeps its result, and the next layer keeps the same as its input."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


def peak(model: MultiTaskModel, schedule: str, segments: Sequence[str]) -> int:
    """Activation bytes of a window, its gradients included."""
    engine = Engine(model, schedule=schedule, recompute=segments)
    window = [{"x": torch.rand(SAMPLES, WIDTH)}]
    measure_peak(lambda: engine.accumulate(window))  # the first time, PyTorch imports parts of itself
    gc.collect()
    model.zero_grad()
    return measure_peak(lambda: engine.accumulate(window), existing=[model]).activation_bytes


@pytest.mark.usefixtures("_without_garbage_collection")
@schedules
def test_a_recomputed_trunk_takes_less_by_its_activations_g4(schedule: str) -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(stack_of(2 * DEPTH), {"a": Squared(stack_of(2 * DEPTH))}, inputs="x")
    without, trunk = peak(model, schedule, []), peak(model, schedule, ["trunk"])
    assert without >= 4 * DEPTH * ACTIVATION, "the model was to be that large"
    assert trunk <= 2 * DEPTH * ACTIVATION + SPARE
    # of four halves one is alive at a time, beside the inputs of the others
    halves = peak(model, schedule, ["trunk[0:8]", "trunk[8:16]", "a[0:8]", "a[8:16]"])
    assert halves <= DEPTH * ACTIVATION + SPARE


@pytest.mark.usefixtures("_without_garbage_collection")
def test_with_the_trunk_recomputed_split_needs_no_more_for_more_heads_g3() -> None:
    def of(heads: int) -> int:
        torch.manual_seed(0)
        tasks = {f"t{i}": Squared(stack_of(1)) for i in range(heads)}
        model = MultiTaskModel(stack_of(DEPTH), tasks, inputs="x")
        return peak(model, "split", ["trunk"])

    gradients_of_three_heads = 3 * (WIDTH + 1) * WIDTH * 4
    # and the gradient at the cut, and the losses
    assert of(4) - of(1) <= ACTIVATION + gradients_of_three_heads + 64 * 4


@pytest.mark.usefixtures("_without_garbage_collection")
@schedules
def test_nothing_that_ran_is_kept_after_a_window_g5(schedule: str) -> None:
    alive: list[tuple[str, weakref.ref[Any]]] = []
    model = watched_model(alive)
    engine = Engine(model, schedule=schedule, recompute=["trunk", "trunk.0[2:4]", "a.0.1", "b"])
    engine.accumulate([{"x": torch.rand(4, 8)}] * 2)
    assert len(alive) >= 2 * (12 + 4 + 2 + 1 + 4), "segments ran, and ran again"
    assert [name for name, ref in alive if ref() is not None] == []


Alive = list[tuple[str, weakref.ref[Any]]]


def kept_between_micro_batches(
    alive: Alive, trunk: nn.Module, tasks: dict[str, Any], labels: str, schedule: str, segments: list[str]
) -> list[int]:
    """How many results of ``Watched`` are alive as each of four micro-batches begins."""
    seen: list[int] = []

    def inputs(batch: Any) -> Tensor:
        seen.append(sum(ref() is not None for _, ref in alive))
        return batch["x"]

    model = MultiTaskModel(trunk, tasks, inputs=inputs)
    batch = {"x": torch.rand(4, 8), **{task: torch.ones(4) for task in labels}}
    Engine(model, schedule=schedule, recompute=segments).accumulate([batch] * 4)
    return seen


@pytest.mark.usefixtures("_without_garbage_collection")
@pytest.mark.parametrize("calls", ["the head", "its layers"])
@schedules
def test_nothing_is_kept_from_one_micro_batch_to_the_next_g4(schedule: str, calls: str) -> None:
    class Layers(Squared):
        """A task need not call its head as a whole."""

        def forward(self, features: Tensor, batch: Any) -> Tensor:
            return self.head[1](self.head[0](features))

    alive: Alive = []
    kind = Squared if calls == "the head" else Layers
    tasks = {name: kind(nn.Sequential(*(Watched(8, alive, name) for _ in range(2)))) for name in "ab"}
    trunk = nn.Sequential(*(Watched(8, alive, "trunk") for _ in range(3)))
    segments = ["trunk", "trunk.1", "a.1", "b.0", "b.1"]
    assert kept_between_micro_batches(alive, trunk, tasks, "ab", schedule, segments) == [0, 0, 0, 0]


@pytest.mark.usefixtures("_without_garbage_collection")
@pytest.mark.parametrize("labels", ["b", "ab"])
@schedules
def test_a_segment_that_nodes_share_keeps_nothing_though_one_of_them_is_idle_g4(
    schedule: str, labels: str
) -> None:
    alive: Alive = []
    shared = Watched(8, alive, "shared")
    tasks = {n: Squared(nn.Sequential(Watched(8, alive, n), shared), n) for n in "ab"}
    trunk = Watched(8, alive, "trunk")
    assert kept_between_micro_batches(alive, trunk, tasks, labels, schedule, ["a.1"]) == [0, 0, 0, 0]
