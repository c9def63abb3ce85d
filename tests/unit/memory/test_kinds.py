"""What the live bytes of a step are and when: kinds and stages, against tensors of known size."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Made
from helpers import SCHEDULE_NAMES, Failing, Squared, assert_equal_states, gradients_of, seed_everything
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mtaccum import Engine, MultiTaskModel, Neck, TaskError, split_batch
from mtaccum.memory import KINDS, LiveBytes, Moment, PeakReport, measure_peak, measure_step
from mtaccum.memory.labels import labelling, state_tensors
from mtaccum.memory.ledger import OPTIMIZER
from mtaccum.structure import tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay"),
    pytest.mark.filterwarnings("ignore:.*nn.utils.weight_norm.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:no gradient reached"),
]

N, INPUTS, HIDDEN, WIDTH, OUT = 32, 8, 24, 16, 2
FLOAT = 4  # bytes
BATCH = N * INPUTS * FLOAT
HIDDEN_MAP, FEATURES, PREDICTION = (N * width * FLOAT for width in (HIDDEN, WIDTH, OUT))
TRUNK = FLOAT * (INPUTS * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH)
HEAD = FLOAT * (WIDTH * OUT + OUT)


@pytest.fixture(autouse=True, scope="module")
def _old_objects_set_aside() -> Iterator[None]:
    """So that collecting garbage takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """Nothing here may depend on when the collector comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def trunk() -> nn.Sequential:
    """Of what its operations keep for the backward, only the result of the sigmoid, HIDDEN_MAP bytes, is
    neither an input nor a parameter."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, WIDTH))


def small_model(*heads: nn.Module, shared: nn.Module | None = None) -> MultiTaskModel:
    torch.manual_seed(0)
    heads = heads or (nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT))
    tasks = {name: Squared(head) for name, head in zip("abc", heads, strict=False)}
    return MultiTaskModel(trunk() if shared is None else shared, tasks, inputs="x")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def batch() -> dict[str, Tensor]:
    return {"x": torch.rand(N, INPUTS)}


def measured(
    model: MultiTaskModel,
    micro_batches: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **settings: Any,
) -> PeakReport:
    """The second step of an engine, moment by moment."""
    engine = Engine(model, optimizer(model.parameters()), **settings)
    engine.step(split_batch(batch(), micro_batches))
    return measure_step(engine, split_batch(batch(), micro_batches), timeline=True)[1]


def kinds_of(moment: Moment) -> dict[str, int]:
    return dict(zip(KINDS, moment.by_kind, strict=True))


def during(report: PeakReport, kind: str, stage: str) -> list[int]:
    """Bytes of a kind, moment by moment, in a stage."""
    found = [kinds_of(moment)[kind] for moment in report.timeline if moment.stage == stage]
    assert found, f"no operation in {stage!r}"
    return found


# --- kind by kind -----------------------------------------------------------------------------------------


def test_parameters_are_parameters_and_buffers_from_beginning_to_end() -> None:
    model = small_model(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, OUT)))
    norm = 4 * WIDTH * FLOAT + 8  # weight, bias, mean, variance, and the number of batches
    report = measured(model)
    assert {kinds_of(moment)["parameters"] for moment in report.timeline} == {TRUNK + HEAD + norm}


def test_shared_and_tied_tensors_count_once() -> None:
    a, b = nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT)
    b.weight = a.weight
    fixed = torch.zeros(1000)
    a.register_buffer("fixed", fixed)
    b.register_buffer("part", fixed[10:20])
    report = measured(small_model(a, b))
    assert report.by_kind["parameters"] == TRUNK + HEAD + OUT * FLOAT + 1000 * FLOAT


def test_gradients_come_to_be_node_by_node() -> None:
    report = measured(small_model())
    assert set(during(report, "gradients", "trunk forward")) == {0}
    assert set(during(report, "gradients", "a forward")) == {0}
    assert set(during(report, "gradients", "b forward")) == {HEAD}
    assert during(report, "gradients", "trunk backward")[0] == 2 * HEAD
    assert set(during(report, "gradients", "optimizer step")) == {TRUNK + 2 * HEAD}


def test_a_gradient_that_is_taken_over_is_no_temporary_any_more() -> None:
    report = measured(small_model(nn.Linear(WIDTH, OUT)))
    assert max(during(report, "temporaries", "trunk backward")) > HIDDEN * WIDTH * FLOAT, "it was made there"
    # what is left are the loss and the norm, for the report
    assert during(report, "temporaries", "optimizer step")[0] < WIDTH * FLOAT


def test_gradients_that_are_added_to_stay_one_set() -> None:
    report = measured(small_model(), micro_batches=2)
    second = [m for m in report.timeline if m.stage == "trunk forward"][-1]
    assert kinds_of(second)["gradients"] == TRUNK + 2 * HEAD
    assert set(during(report, "gradients", "optimizer step")) == {TRUNK + 2 * HEAD}
    # one at a time is there twice, the sum beside what it is the sum of
    assert max(kinds_of(m)["gradients"] for m in report.timeline) <= TRUNK + 2 * HEAD + HIDDEN * WIDTH * FLOAT


def test_gradients_that_were_there_before_are_gradients() -> None:
    model = small_model()
    engine = Engine(model)
    engine.accumulate([batch()])
    _, report = measure_step(engine, [batch()], timeline=True)
    assert report.start_bytes == 2 * (TRUNK + 2 * HEAD) + BATCH
    assert report.by_kind["gradients"] >= TRUNK + 2 * HEAD


def test_optimizer_state_comes_with_the_first_step_and_stays() -> None:
    model = small_model()
    optimizer = adamw(model)
    engine = Engine(model, optimizer)
    state = 2 * (TRUNK + 2 * HEAD) + 8 * FLOAT  # two moments, and the number of steps of each of 8 parameters
    live = LiveBytes([model])
    with live, labelling(live, model, optimizer):
        engine.step([batch()])
        assert live.current_by_kind["optimizer state"] == state
        assert live.current_by_kind["gradients"] == 0, "a step leaves none"
    _, report = measure_step(engine, [batch()], timeline=True)
    assert {kinds_of(moment)["optimizer state"] for moment in report.timeline} == {state}


def test_the_state_is_temporary_while_the_first_step_makes_it() -> None:
    model = small_model()
    _, report = measure_step(Engine(model, adamw(model)), [batch()], timeline=True)
    assert {kinds_of(moment)["optimizer state"] for moment in report.timeline} == {0}
    assert report.stage == "optimizer step"
    assert report.by_kind["temporaries"] >= 2 * (TRUNK + 2 * HEAD)


def test_momentum_is_one_set_of_state() -> None:
    model = small_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    engine.step([batch()])
    _, report = measure_step(engine, [batch()])
    assert report.by_kind["optimizer state"] == TRUNK + 2 * HEAD


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_inputs_are_all_of_the_window(micro_batches: int) -> None:
    report = measured(small_model(), micro_batches)
    assert {kinds_of(moment)["inputs"] for moment in report.timeline} == {BATCH}


def test_features_are_those_at_the_cut_and_their_gradient() -> None:
    report = measured(small_model())
    assert set(during(report, "features", "trunk forward")) == {0}, "not known yet"
    assert set(during(report, "features", "a forward")) == {FEATURES}
    assert set(during(report, "features", "b forward")) == {2 * FEATURES}, (
        "with the gradient of the first head"
    )
    assert set(during(report, "features", "optimizer step")) == {0}


@pytest.mark.parametrize("schedule", ["summed", "sequential"])
def test_without_a_cut_there_are_no_features(schedule: str) -> None:
    report = measured(small_model(), schedule=schedule)
    assert {kinds_of(moment)["features"] for moment in report.timeline} == {0}


def test_features_of_a_neck_are_features_too() -> None:
    torch.manual_seed(0)
    model = MultiTaskModel(
        trunk(),
        {"a": Squared(nn.Linear(WIDTH, OUT), on="neck")},
        inputs="x",
        necks={"neck": Neck(nn.Linear(WIDTH, WIDTH))},
    )
    report = measured(model)
    assert set(during(report, "features", "neck forward")) == {FEATURES}
    assert set(during(report, "features", "a forward")) == {2 * FEATURES}


def test_activations_are_what_a_backward_needs() -> None:
    report = measured(small_model())
    assert during(report, "activations", "trunk forward")[-1] == HIDDEN_MAP
    # the square of the prediction keeps the prediction
    assert during(report, "activations", "a forward")[-1] == HIDDEN_MAP + PREDICTION
    assert during(report, "activations", "a backward")[-1] == HIDDEN_MAP, "freed in the head's backward"
    assert during(report, "activations", "b forward")[-1] == HIDDEN_MAP + PREDICTION
    assert during(report, "activations", "trunk backward")[-1] == 0
    assert set(during(report, "activations", "optimizer step")) == {0}


def test_summed_keeps_the_activations_of_all_heads() -> None:
    report = measured(small_model(), schedule="summed")
    # without a cut the features are what the heads keep for their weights
    assert during(report, "activations", "b forward")[-1] == HIDDEN_MAP + FEATURES + 2 * PREDICTION
    assert during(report, "activations", "all tasks backward")[-1] == 0


def test_sequential_keeps_the_activations_of_one_path() -> None:
    report = measured(small_model(), schedule="sequential")
    assert set(during(report, "activations", "trunk forward")) == {0, HIDDEN_MAP}
    assert during(report, "activations", "b forward")[-1] == HIDDEN_MAP + FEATURES + PREDICTION


def test_what_is_recomputed_is_made_in_the_backward() -> None:
    report = measured(small_model(), recompute=["trunk"])
    assert set(during(report, "activations", "trunk forward")) == {0}
    assert during(report, "activations", "a forward")[-1] == PREDICTION
    # what its layers make, of which the first result goes when the last comes
    assert max(during(report, "activations", "trunk backward")) == 2 * HIDDEN_MAP
    assert during(report, "activations", "trunk backward")[-1] == 0


def test_temporaries_are_what_nobody_keeps() -> None:
    head = Made(lambda self, f: self.layer(f * 3 - 1), layer=nn.Linear(WIDTH, OUT))
    report = measured(small_model(head))
    # the product is used by the subtraction only, whose result the layer keeps
    _, *in_head = during(report, "temporaries", "a forward")  # first the features get an alias
    assert FEATURES <= in_head[0] < FEATURES + 2 * FLOAT  # with what the cut hands the gradient over by
    assert in_head[1] - in_head[0] == FEATURES
    assert during(report, "activations", "a forward")[-1] == HIDDEN_MAP + FEATURES + PREDICTION
    assert in_head[-1] < FEATURES


def test_views_and_operations_in_place_make_nothing() -> None:
    def in_place(self: Any, f: Tensor) -> Tensor:
        return self.layer(f.view(N, 2, WIDTH // 2)[:, 0]).relu_()

    def in_new_places(self: Any, f: Tensor) -> Tensor:
        return self.layer(f.view(N, 2, WIDTH // 2)[:, 0]).relu()

    reports = [
        measured(small_model(Made(run, layer=nn.Linear(WIDTH // 2, OUT))))
        for run in (in_place, in_new_places)
    ]
    # the result of the layer is that of the ReLU, or one more until the ReLU is done
    at_relu = [next(m for m in report.timeline if "aten.relu" in m.op) for report in reports]
    assert [moment.op for moment in at_relu] == ["aten.relu_.default", "aten.relu.default"]
    assert at_relu[1].live_bytes - at_relu[0].live_bytes == PREDICTION
    for report in reports:
        assert during(report, "features", "a forward")[-1] == FEATURES, "a view of them is no copy"
        assert during(report, "activations", "a forward")[-1] == HIDDEN_MAP + PREDICTION


def test_averaged_weights_beside_the_model_are_parameters() -> None:
    model, average = small_model(), small_model()
    engine = Engine(model, adamw(model))
    engine.step([batch()])
    _, report = measure_step(engine, [batch()], existing=[average])
    assert report.by_kind["parameters"] == 2 * (TRUNK + 2 * HEAD)


# --- sums, stages and peaks -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("recompute", [(), ("trunk", "a")])
def test_the_kinds_are_all_there_is_at_each_moment(schedule: str, recompute: Sequence[str]) -> None:
    report = measured(small_model(), 3, schedule=schedule, recompute=recompute, max_grad_norm=1.0)
    assert len(report.timeline) > 50
    for moment in report.timeline:
        assert sum(moment.by_kind) == moment.live_bytes
        assert min(moment.by_kind) >= 0
    assert sum(report.by_kind.values()) == report.peak_bytes


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_the_peak_is_the_highest_moment_of_the_timeline(schedule: str) -> None:
    report = measured(small_model(), 2, schedule=schedule)
    highest = max(report.timeline, key=lambda moment: moment.live_bytes)
    assert (report.peak_bytes, report.stage) == (highest.live_bytes, highest.stage)
    assert dict(report.by_kind) == kinds_of(highest)


def stages_of(report: PeakReport) -> list[str]:
    """The stages in which operations ran, in order."""
    return list(dict.fromkeys(moment.stage for moment in report.timeline if moment.stage))


HEADS = [f"{name} {phase}" for name in "ab" for phase in ("forward", "backward")]


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({"schedule": "split"}, ["trunk forward", *HEADS, "trunk backward", "optimizer step"]),
        ({"schedule": "sequential"}, ["trunk forward", *HEADS, "optimizer step"]),
        (
            {"schedule": "summed"},
            ["trunk forward", "a forward", "b forward", "all tasks backward", "optimizer step"],
        ),
        (
            {"head_groups": [["a", "b"]]},
            ["trunk forward", "a+b forward", "a+b backward", "trunk backward", "optimizer step"],
        ),
        ({"chunks": {"a": 2}}, ["trunk forward", *HEADS, "trunk backward", "optimizer step"]),
    ],
)
def test_stages_say_which_node_runs(settings: dict[str, Any], stages: list[str]) -> None:
    assert stages_of(measured(small_model(), **settings)) == stages


@pytest.mark.parametrize(
    ("shared", "head", "stage"),
    [
        (nn.Linear(INPUTS, WIDTH), nn.Sequential(nn.Linear(WIDTH, 4000), nn.Sigmoid()), "a backward"),
        (nn.Sequential(nn.Linear(INPUTS, 4000), nn.Tanh(), nn.Linear(4000, WIDTH)), None, "trunk backward"),
    ],
)
def test_the_peak_is_in_the_stage_of_what_is_large(
    shared: nn.Module, head: nn.Module | None, stage: str
) -> None:
    model = small_model(head or nn.Linear(WIDTH, OUT), shared=shared)
    engine = Engine(model)
    window = [{"x": torch.rand(1024, INPUTS)}]
    engine.accumulate(window)
    model.zero_grad()
    assert measure_step(engine, window)[1].stage == stage


def test_the_optimizers_step_is_the_peak_of_many_parameters() -> None:
    embedding = Made(lambda self, x: self.table(x[:, 0].long()), table=nn.Embedding(5000, WIDTH))
    report = measured(small_model(shared=embedding), optimizer=torch.optim.RMSprop)
    assert report.stage == "optimizer step"


def test_a_new_peak_begins_where_it_is_reset() -> None:
    model = small_model()
    engine = Engine(model)
    live = LiveBytes([model])
    with live, labelling(live, model):
        engine.accumulate([batch()])
        assert live.peak_stage == "trunk backward"
        live.reset_peak()
        assert (live.peak_bytes, live.peak_stage) == (live.current_bytes, "")
        assert live.peak_by_kind == live.current_by_kind
        assert live.peak_by_kind["gradients"] == TRUNK + 2 * HEAD


# --- labelling changes nothing ----------------------------------------------------------------------------


def run(name: str, schedule: str, look: str) -> tuple[MultiTaskModel, list[Any], int | None]:
    """Three micro-batches of an architecture, in one of three ways to look at them."""
    architecture = ARCHITECTURES[name]
    model, window = architecture.model(), architecture.window(3)
    engine = Engine(model, schedule=schedule)
    seed_everything(3)
    random.seed(3)
    if look == "unseen":
        engine.accumulate(window)
        return model, window, None
    if look == "labelled":
        return model, window, measure_step(engine, window)[1].peak_bytes
    existing = [model, *tensors_of(window, strict=False)]
    return model, window, measure_peak(lambda: engine.accumulate(window), existing=existing).peak_bytes


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_labelling_changes_neither_peak_nor_gradients(name: str) -> None:
    schedule = SCHEDULE_NAMES[list(ARCHITECTURES).index(name) % 3]
    # the first time under a tracker, PyTorch imports parts of itself, and leaves garbage
    run(name, schedule, "counted")
    gc.collect()
    model, window, _ = run(name, schedule, "unseen")
    expected = gradients_of(model)
    counted, counted_window, peak = run(name, schedule, "counted")
    gc.collect()
    labelled, labelled_window, labelled_peak = run(name, schedule, "labelled")
    assert labelled_peak == peak
    for other, batches in ((counted, counted_window), (labelled, labelled_window)):
        for parameter, gradient in gradients_of(other).items():
            assert (gradient is None) == (expected[parameter] is None), parameter
            assert gradient is None or torch.equal(gradient, expected[parameter]), parameter
        assert_equal_states(dict(other.named_buffers()), dict(model.named_buffers()))
        pairs = zip(tensors_of(batches, strict=False), tensors_of(window, strict=False), strict=True)
        for one, two in pairs:
            assert (one.grad is None) == (two.grad is None)
            assert one.grad is None or torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_features_that_no_head_uses_are_gone_with_their_micro_batch(schedule: str) -> None:
    """An operation that keeps its own result would, if watched carelessly, keep its graph alive."""
    both = Made(lambda self, x: (self.layer(x), self.layer(x).exp().tanh()), layer=nn.Linear(INPUTS, WIDTH))
    heads = [Made(lambda self, f: self.layer(f[0]), layer=nn.Linear(WIDTH, OUT)) for _ in range(2)]
    model = small_model(*heads, shared=both)
    engine = Engine(model, schedule=schedule)
    peaks = []
    for micro_batches in (2, 8):
        model.zero_grad()
        engine.accumulate([batch() for _ in range(micro_batches)])
        model.zero_grad()
        peaks.append(measure_step(engine, [batch() for _ in range(micro_batches)])[1].activation_bytes)
    assert peaks[0] == peaks[1]


def assert_nothing_is_left(model: MultiTaskModel) -> None:
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    gc.collect()  # errors are in cycles with the frames that they have passed
    left = [thing for thing in gc.get_objects() if type(thing) is LiveBytes]
    assert not left, "somebody still tells them of stages"
    seen: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        model.trunk(batch()["x"])
    assert seen, "hooks of others are in force"


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_nothing_is_left_behind(schedule: str) -> None:
    model = small_model()
    measure_step(Engine(model, adamw(model), schedule=schedule), [batch()])
    assert_nothing_is_left(model)


def test_nothing_is_left_behind_after_an_error() -> None:
    error = ValueError("no")
    model = small_model(nn.Linear(WIDTH, OUT), Failing(nn.Linear(WIDTH, OUT), error))
    engine = Engine(model, adamw(model))
    for _ in range(2):
        with pytest.raises(TaskError, match="no"):
            measure_step(engine, [batch()])
        error.with_traceback(None)  # the model has it, and it the frames that it has passed
        assert_nothing_is_left(model)


def test_parameters_that_do_not_learn_get_no_hook() -> None:
    model = small_model()
    model.trunk.requires_grad_(False)
    report = measured(model)
    assert set(during(report, "gradients", "optimizer step")) == {2 * HEAD}
    assert report.by_kind["features"] in (0, FEATURES), "no gradient is sent back"


# --- measure_step -----------------------------------------------------------------------------------------


def test_an_engine_without_an_optimizer_is_measured_over_its_accumulation() -> None:
    model = small_model()
    result, report = measure_step(Engine(model), [batch()], timeline=True)
    assert not result.stepped
    assert report.by_kind["optimizer state"] == 0
    assert not any("optimizer" in moment.stage for moment in report.timeline)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert report.method == "live tensor bytes"


def test_a_report_has_a_timeline_only_if_asked() -> None:
    model = small_model()
    assert measure_step(Engine(model), [batch()])[1].timeline == ()


def test_the_result_is_that_of_the_step() -> None:
    models = [small_model(), small_model()]
    engines = [Engine(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    torch.manual_seed(5)
    data = batch()
    expected = engines[0].step([data])
    result, _ = measure_step(engines[1], [data])
    assert result.stepped
    assert result.losses == expected.losses
    assert_equal_states(models[0].state_dict(), models[1].state_dict())


def test_what_is_given_beforehand_is_at_the_start() -> None:
    model = small_model()
    optimizer = adamw(model)
    Engine(model, optimizer).step([batch()])
    state = state_tensors(optimizer)
    live = LiveBytes([model, *state, torch.zeros(5)])
    live.label(state, OPTIMIZER)
    assert live.current_by_kind["optimizer state"] == sum(tensor.nbytes for tensor in state)
    assert live.current_by_kind["inputs"] == 0, "nobody holds those five numbers"


def test_a_stronger_kind_stays() -> None:
    tensor = torch.zeros(4)
    live = LiveBytes([tensor])
    for kind, name in ((6, "inputs"), (5, "inputs"), (3, "inputs"), (1, "gradients"), (4, "gradients")):
        live.label([tensor], kind)
        assert live.current_by_kind == {**dict.fromkeys(KINDS, 0), name: 16}


# --- on a CUDA device -------------------------------------------------------------------------------------

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_cuda(test: Callable[..., None]) -> Callable[..., None]:
    for mark in cuda:
        test = mark(test)
    return test


@on_cuda
def test_on_cuda_only_the_micro_batch_that_runs_is_an_input() -> None:
    model = small_model().cuda()
    engine = Engine(model, torch.optim.AdamW(model.parameters()))
    window = split_batch(batch(), 4)
    engine.step(window)
    _, report = measure_step(engine, window, timeline=True)
    assert report.method == "CUDA allocator peak"
    assert max(kinds_of(moment)["inputs"] for moment in report.timeline) == BATCH // 4
    assert sum(report.by_kind.values()) <= report.peak_bytes == report.allocated_bytes


@on_cuda
def test_on_cuda_the_kinds_are_those_of_the_cpu() -> None:
    model = small_model().cuda()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    engine.step([batch()])
    _, report = measure_step(engine, [batch()], timeline=True)
    assert report.by_kind["parameters"] == report.by_kind["optimizer state"] == TRUNK + 2 * HEAD
    assert set(during(report, "features", "b forward")) == {2 * FEATURES}
    assert during(report, "activations", "trunk forward")[-1] == HIDDEN_MAP
    assert set(during(report, "gradients", "optimizer step")) == {TRUNK + 2 * HEAD}


@on_cuda
def test_on_cuda_activations_that_are_offloaded_are_not_on_the_device() -> None:
    model = small_model().cuda()
    report = measured(model, offload=True)
    assert during(report, "activations", "a forward")[-1] == 0
