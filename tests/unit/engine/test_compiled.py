"""Compiling node by node: the same gradients, one graph per node, and no second compilation."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import (
    SCHEDULE_NAMES,
    AwkwardTrunk,
    Both,
    Failing,
    FeaturePyramid,
    OnVector,
    Squared,
    Twice,
    assert_close_gradients,
    assert_equal_states,
    awkward_batch,
    gradients_of,
    joint_reference,
    seed_everything,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from mtaccum import (
    Classification,
    ConfigError,
    Engine,
    MultiTaskModel,
    Neck,
    NonfiniteError,
    Regression,
    Segmentation,
    TaskError,
)
from mtaccum.engine.compiled import compiled_modules
from mtaccum.engine.segments import find_segments
from mtaccum.engine.window_counts import WindowCounts

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # PyTorch uses it when it compiles
    pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    torch._dynamo.reset()
    counters.clear()


def awkward_model() -> MultiTaskModel:
    """What of the tests' awkward model PyTorch can compile: no randomness of NumPy's."""
    torch.manual_seed(0)
    left = OnVector(2)
    tasks = {
        "seg": Segmentation(num_classes=3, head=Both(3), target="seg", on=("trunk", "fpn"), weight=0.7),
        "depth": Regression(head=Twice(), dense=True, criterion="huber", weight=2.0),
        "cls": Classification(num_classes=3, head=OnVector(3, spectral=True), weight=1.3),
        "left": Regression(2, head=left, target="pair", criterion="mse"),
        "right": Regression(2, head=OnVector(2, tied_to=left), target="pair", weight=0.1),
    }
    return MultiTaskModel(
        AwkwardTrunk(), tasks, inputs="image", necks={"fpn": Neck(FeaturePyramid())}
    ).double()


class Net(nn.Module):
    """(n, 3) to (n, 4), with normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.norm(self.layer(x))))


class Head(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x)).tanh()


class OtherHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).exp()


def small_model(**settings: Any) -> MultiTaskModel:
    torch.manual_seed(0)
    tasks = {"a": Squared(Head(3), "a", **settings), "b": Squared(OtherHead(), "b")}
    return MultiTaskModel(Net(), tasks, inputs="x").double()


def batch_of(samples: int = 4, seed: int = 1, labels: str = "ab") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return {"x": x, **{task: torch.ones(samples) for task in labels}}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def run(
    model: MultiTaskModel, window: list[Any], schedule: str, **settings: Any
) -> tuple[dict[str, Tensor | None], dict[str, Tensor], Tensor]:
    """Gradients, buffers and random state after a window on a copy of the model."""
    model = copy.deepcopy(model)
    seed_everything(1)
    Engine(model, schedule=schedule, **settings).accumulate(window)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return gradients_of(model), buffers, torch.get_rng_state()


# --- the same values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "recompute"),
    [
        ("eager", ()),
        ("eager", ("trunk.conv", "trunk.norm", "fpn", "seg.conv")),
        ("aot_eager", ("trunk", "depth")),
    ],
    ids=["eager", "eager, segments recomputed", "aot_eager, nodes recomputed"],
)
@schedules
def test_gradients_are_the_joint_ones_without_a_graph_break(
    schedule: str, backend: str, recompute: Sequence[str]
) -> None:
    model, window = awkward_model(), [awkward_batch(3), awkward_batch(3, seed=2)]
    seed_everything(1)
    reference = joint_reference(model, window)
    state = torch.get_rng_state()

    seed_everything(1)
    engine = Engine(
        model, schedule=schedule, recompute=recompute, compile={"backend": backend, "fullgraph": True}
    )
    engine.accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, reference.buffers[name], rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.get_rng_state(), state)
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] >= 6, "one for each node"


@pytest.mark.parametrize("mode", ["frozen", "detached"])
@schedules
def test_tasks_of_any_mode_are_the_same_compiled(schedule: str, mode: str) -> None:
    model, window = small_model(mode=mode), [batch_of(), batch_of(seed=2)]
    compiled = run(model, window, schedule, compile={"backend": "aot_eager", "fullgraph": True})
    gradients, buffers, state = run(model, window, schedule)
    assert compiled[0].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (compiled[0][name] is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(compiled[0][name], gradient, rtol=1e-12, atol=1e-14)
    for name, buffer in buffers.items():
        torch.testing.assert_close(compiled[1][name], buffer, rtol=1e-12, atol=1e-14)
    assert torch.equal(compiled[2], state)


@pytest.mark.parametrize(("precision", "policy"), [("bf16", "keep"), ("fp32", "freeze")])
@schedules
def test_precision_and_normalisation_are_the_same_compiled(
    schedule: str, precision: str, policy: str
) -> None:
    model = small_model().float()
    window = [{**batch, "x": batch["x"].float()} for batch in (batch_of(), batch_of(seed=2, labels="b"))]
    settings = {"precision": precision, "batchnorm": policy}
    compiled = run(model, window, schedule, compile={"backend": "eager", "fullgraph": True}, **settings)
    without = run(model, window, schedule, **settings)
    assert_equal_states(compiled[0], without[0])
    assert_equal_states(compiled[1], without[1])
    assert torch.equal(compiled[2], without[2])


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler")
def test_the_default_backend_gives_the_same_gradients() -> None:
    class Tanh(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.layer = nn.Linear(3, outputs)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)) * 2

    torch.manual_seed(0)
    model = MultiTaskModel(Tanh(3), {"a": Squared(nn.Identity())}, inputs="x").double()
    batch = {"x": torch.rand(4, 3, dtype=torch.float64)}
    reference = joint_reference(model, [batch])
    Engine(model, recompute=["trunk"], compile=True).accumulate([batch])
    assert_close_gradients(model, reference, 1e-12)


# --- how often it compiles --------------------------------------------------------------------------------


def count(model: MultiTaskModel, schedule: str, windows: list[list[Any]], **settings: Any) -> list[int]:
    """How many graphs were compiled after each window."""
    counter, counts = CompileCounter(), []
    engine = Engine(
        model, sgd(model), schedule=schedule, compile={"backend": counter, "fullgraph": True}, **settings
    )
    for window in windows:
        engine.step(window)
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("micro_batches", [1, 3])
@schedules
def test_each_node_is_compiled_once_for_all_windows_of_one_shape(schedule: str, micro_batches: int) -> None:
    windows = [[batch_of(seed=10 * step + i) for i in range(micro_batches)] for step in range(4)]
    assert count(small_model(), schedule, windows) == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("recompute", "graphs"), [(["trunk"], 3), (["trunk.layer", "trunk.norm"], 4), (["a.norm", "b"], 3)]
)
@schedules
def test_recomputed_segments_are_compiled_once_too(schedule: str, recompute: list[str], graphs: int) -> None:
    windows = [[batch_of(seed=step)] for step in range(3)]
    counts = count(small_model(), schedule, windows, recompute=recompute)
    assert counts == [graphs] * 3


@pytest.mark.parametrize("mode", ["frozen", "detached"])
def test_a_mode_costs_no_compilation_per_window(mode: str) -> None:
    windows = [[batch_of(seed=step)] for step in range(3)]
    assert count(small_model(mode=mode), "split", windows) == [3, 3, 3]


def test_skipped_steps_and_the_search_cost_no_compilation() -> None:
    bad = batch_of(seed=2)
    bad["x"][0] = float("nan")
    windows = [[batch_of()], [bad], [batch_of(seed=3)], [bad]]
    assert count(small_model(), "split", windows, on_nonfinite="skip") == [3, 3, 3, 3]


@pytest.mark.filterwarnings("ignore:batchnorm='sync'")
@pytest.mark.parametrize("recompute", [[], ["trunk.norm"]], ids=["a node", "a recomputed segment"])
@pytest.mark.parametrize("policy", ["keep", "sync"])
def test_layers_that_sync_replaces_are_compiled_too(policy: str, recompute: list[str]) -> None:
    trunk, width = (Net(), 4) if recompute else (nn.BatchNorm1d(3), 3)
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(width, 2))}, inputs="x").double()
    assert count(model, "split", [[batch_of()]], batchnorm=policy, recompute=recompute) == [2]


def test_windows_of_any_number_of_micro_batches_can_be_compiled() -> None:
    # the momentum of running statistics depends on the number; with a graph for each, PyTorch's limit of
    # eight would be reached, and that is an error here instead of a silent end of compiling
    model = small_model()
    count(model, "split", [[batch_of()] * k for k in range(1, 11)])
    assert model.trunk.norm.momentum == 0.1


@pytest.mark.parametrize("kind", ["a class of one's own", "Sequential"])
def test_a_dozen_heads_of_one_class_can_be_compiled(kind: str) -> None:
    # PyTorch counts the graphs of a piece of code, and heads of one class share theirs
    def head(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, outputs), nn.Tanh()) if kind == "Sequential" else Head(outputs)

    torch.manual_seed(0)
    tasks = {f"t{i}": Squared(head(i + 1)) for i in range(12)}
    model = MultiTaskModel(Net(), tasks, inputs="x").double()
    assert count(model, "split", [[batch_of()], [batch_of(seed=2)]]) == [13, 13]


# --- what is compiled -------------------------------------------------------------------------------------


def segments_model() -> MultiTaskModel:
    trunk = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    tasks = {"a": Squared(nn.Linear(4, 1)), "b": Squared(nn.Sequential(nn.Linear(4, 1)), on="neck")}
    return MultiTaskModel(trunk, tasks, inputs="x", necks={"neck": Neck(nn.Linear(4, 4))})


@pytest.mark.parametrize(
    ("recompute", "names"),
    [
        ([], ["trunk", "neck", "a", "b"]),
        (["trunk", "a"], ["trunk", "neck", "a", "b"]),
        (["trunk.1"], ["trunk.1", "neck", "a", "b"]),
        (["trunk.1", "trunk.1.0"], ["trunk.1.0", "neck", "a", "b"]),
        (["trunk", "trunk.2"], ["trunk.2", "neck", "a", "b"]),
        (["trunk[0:2]"], ["trunk.0", "trunk.1", "neck", "a", "b"]),
        (["trunk[0:2]", "trunk.1"], ["trunk.0", "trunk.1", "neck", "a", "b"]),
        (["trunk[0:2]", "trunk.1.0"], ["trunk.0", "trunk.1.0", "neck", "a", "b"]),
        (["neck", "b.0"], ["trunk", "neck", "a", "b.0"]),
    ],
    ids=" ".join,
)
def test_compiled_modules_hold_no_recomputed_segment(recompute: list[str], names: list[str]) -> None:
    model = segments_model()
    found = compiled_modules(model, find_segments(model, recompute))
    modules = [find_segments(model, [name])[0].module for name in names]
    assert {id(module) for module in found} == {id(module) for module in modules}
    assert len(found) == len(modules)


def test_a_module_that_is_two_nodes_is_compiled_once() -> None:
    head = nn.Linear(4, 1)
    model = MultiTaskModel(nn.Linear(4, 4), {"a": Squared(head), "b": Squared(head)}, inputs="x")
    assert compiled_modules(model, []) == [model.trunk, head]


def test_a_child_that_stands_twice_is_counted_twice() -> None:
    act = nn.Tanh()
    trunk = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    model = MultiTaskModel(trunk, {"a": Squared(nn.Linear(4, 1))}, inputs="x")
    found = compiled_modules(model, find_segments(model, ["trunk[2:4]"]))
    assert {id(module) for module in found} == {id(trunk[2]), id(act), id(model.task("a").head)}


# --- the model is left as it was, and what goes wrong -----------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("recompute", [[], ["trunk", "trunk.layer", "a"]], ids=len)
def test_forwards_are_the_modules_own_again_g7(broken: bool, recompute: list[str]) -> None:
    head = Failing(nn.Linear(4, 1), RuntimeError("broken"))
    head.broken = broken
    torch.manual_seed(0)
    tasks = {"a": Squared(OtherHead()), "b": Squared(head)}
    model = MultiTaskModel(Net(), tasks, inputs="x").double()
    engine = Engine(model, recompute=recompute, compile={"backend": "eager"})
    before = [list(vars(module)) for module in model.modules()]
    if broken:
        with pytest.raises(TaskError, match="task 'b'.*broken"):
            engine.accumulate([batch_of()])
    else:
        engine.accumulate([batch_of()])
    assert [list(vars(module)) for module in model.modules()] == before
    copy.deepcopy(model)


def test_a_forward_of_a_modules_own_is_compiled_and_comes_back() -> None:
    model, counter = small_model(), CompileCounter()
    head = model.task("b").head

    def mine(x: Tensor) -> Tensor:
        return head.layer(x) * 3

    head.forward = mine
    head.layer.weight.data.fill_(1)
    head.layer.bias.data.fill_(0)
    engine = Engine(model, compile={"backend": counter})
    model.trunk.eval()
    batch = batch_of()
    result = engine.accumulate([batch])
    assert head.forward is mine
    assert counter.frame_count == 3
    expected = (model.trunk(batch["x"]).sum(1) * 3).square().mean()
    torch.testing.assert_close(result.losses["b"], expected.detach(), rtol=1e-12, atol=0)


def test_evaluation_between_windows_is_not_compiled() -> None:
    counter, model = CompileCounter(), small_model()
    engine = Engine(model, compile={"backend": counter})
    model(batch_of())
    assert counter.frame_count == 0
    engine.accumulate([batch_of()])
    frames = counter.frame_count
    model.eval()(batch_of(7))
    assert counter.frame_count == frames == 3


def test_a_bad_loss_is_found_in_compiled_nodes_too() -> None:
    model = small_model()
    nn.init.constant_(model.task("b").head.layer.bias, 1e3)  # exp of that is infinite
    engine = Engine(model, sgd(model), compile={"backend": "eager"})
    with pytest.raises(NonfiniteError, match=r"loss of task 'b' is inf.*the prediction of 'b'"):
        engine.step([batch_of()])


def test_a_script_module_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    model = MultiTaskModel(scripted, {"a": Squared(OtherHead())}, inputs="x").double()
    batch = batch_of()
    model.task("a").head(scripted(batch["x"])).square().mean().backward()
    expected = gradients_of(model)
    model.zero_grad()
    Engine(model, compile={"backend": "eager"}).accumulate([batch])
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nothing"}, "Invalid backend: 'nothing'"),
        ({"mode": "fastest"}, "fastest"),
        ({"nothing": 1}, "nothing"),
        ({"options": {"nothing": 1}}, "nothing"),
        ({"mode": "default", "options": {"nothing": 1}}, "mode"),
    ],
    ids=str,
)
def test_options_that_torch_does_not_take_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"compile=.*{message}"):
        Engine(small_model(), compile=options)


@pytest.mark.parametrize("given", [{"backend": "eager"}, {"backend": "eager", "dynamic": True}, False, {}])
def test_a_dict_is_options_and_an_empty_one_means_yes(given: Any) -> None:
    engine = Engine(small_model(), compile=given)
    counts = WindowCounts.agreed(engine.count_labels([batch_of()]), engine.model, engine.ranks)
    with engine._run._levers.running(counts):
        replaced = [name for name, m in engine.model.named_modules() if "forward" in vars(m)]
    assert replaced == ([] if given is False else ["trunk", "tasks.a.head", "tasks.b.head"])


@pytest.mark.parametrize("given", [None, "inductor", 1])
def test_what_is_neither_a_choice_nor_options_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="compile must be True, False or a dict of options"):
        Engine(small_model(), compile=given)
