"""The three schedules beside their contract (``test_contract.py``): what lives when, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import (
    SCHEDULE_NAMES,
    Squared,
    assert_close_gradients,
    awkward_batch,
    awkward_model,
    gradients_of,
    joint_reference,
    plain_batch,
    plain_model,
    seed_everything,
)
from torch import Tensor, nn

from mtaccum import (
    Classification,
    Engine,
    FeatureError,
    InplaceError,
    MultiTaskModel,
    Neck,
    TaskError,
    split_backward,
    split_batch,
)
from mtaccum.structure import tensors_of

schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)


# --- exactness --------------------------------------------------------------------------------------------


@schedules
def test_float32_gradients_equal_the_float64_reference_to_its_rounding(schedule: str) -> None:
    # without dropout, whose masks are drawn differently in the two precisions
    model, window = plain_model(), split_batch(plain_batch(13, missing=0.4), 3)
    reference = joint_reference(model, window)
    single = [{k: v.float() if v.is_floating_point() else v for k, v in batch.items()} for batch in window]

    Engine(model.float(), schedule=schedule).accumulate(single)

    assert_close_gradients(model.double(), reference, 1e-5)


@schedules
def test_several_steps_of_training_equal_those_by_hand(schedule: str) -> None:
    model = awkward_model()
    by_hand = copy.deepcopy(model)
    # not Adam: it would blow up the rounding in gradients that are 0, as those of biases before BatchNorm
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    other = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    engine = Engine(model, optimizer, schedule=schedule)
    for step in range(3):
        window = split_batch(awkward_batch(6, seed=step), 2)
        seed_everything(step)
        reference = joint_reference(by_hand, window)
        for name, parameter in by_hand.named_parameters():
            parameter.grad = reference.gradients[name]
        other.step()
        buffers = dict(by_hand.named_buffers())
        for name, value in reference.buffers.items():
            buffers[name].copy_(value)
        seed_everything(step)
        engine.step(window)
    for (name, one), two in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(
            one, two, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@schedules
def test_schedules_agree_bit_for_bit_on_buffers_and_dropout_masks(schedule: str) -> None:
    model, window = awkward_model(), [awkward_batch(4)]
    masks: list[Tensor] = []
    model.trunk.dropout.register_forward_hook(lambda _m, _i, output: masks.append(output.detach() == 0))
    model.necks["deep"].module.dropout.register_forward_hook(
        lambda _m, _i, output: masks.append(output.detach() == 0)
    )
    seed_everything(3)
    joint_reference(model, window)  # a copy of the model, with its hooks: two masks
    joint = list(masks)
    assert len(joint) == 2
    masks.clear()

    seed_everything(3)
    Engine(model, schedule=schedule).accumulate(window)

    assert len(masks) == {"summed": 2, "sequential": 7 + 1, "split": 2}[schedule]
    for mask in masks:
        assert torch.equal(mask, joint[0 if mask.dim() == 4 else 1])


@schedules
def test_a_tensor_that_stands_in_several_places_stays_one(schedule: str) -> None:
    # cut in two, it would take the memory of two gradients
    class Same(nn.Module):
        def forward(self, features: dict[str, Any]) -> Tensor:
            assert features["list"][2][0] is features["pyramid"].fine
            return features["pyramid"].fine

    model = MultiTaskModel(
        awkward_model().trunk, {"a": Squared(Same()), "b": Squared(Same())}, inputs="image"
    )
    Engine(model, schedule=schedule).accumulate([awkward_batch(2)])


@schedules
def test_passes_of_the_trunk(schedule: str) -> None:
    model = awkward_model()
    passes: list[None] = []
    model.trunk.register_forward_hook(lambda *_: passes.append(None))
    Engine(model, schedule=schedule).accumulate([awkward_batch(2), awkward_batch(3)])
    assert len(passes) == {"summed": 2, "sequential": 2 * 7, "split": 2}[schedule]


# --- lifetimes --------------------------------------------------------------------------------------------


class Saved:
    """Stands in for a tensor that autograd saved, so that its life can be watched."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def watching(model: MultiTaskModel) -> Iterator[Callable[[], list[str]]]:
    """Yields a function: the nodes whose forwards saved tensors that are alive now."""
    alive: list[tuple[str, weakref.ref[Saved]]] = []
    running: list[str] = []
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        handles.append(module.register_forward_pre_hook(lambda *_: running.append(name)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        alive.append((running[-1] if running else "loss", weakref.ref(saved)))
        return saved

    watch("trunk", model.trunk)
    for name in (*model.necks, *model.tasks):
        watch(name, model.node(name))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            yield lambda: sorted({name for name, ref in alive if ref() is not None})
    finally:
        for handle in handles:
            handle.remove()


def test_after_each_head_no_saved_tensor_of_it_is_alive_in_split_g2() -> None:
    model, seen = awkward_model(), []
    with watching(model) as alive:

        def backward(loss: Tensor) -> None:
            before = alive()
            loss.backward()
            seen.append((before, alive()))

        Engine(model, schedule="split", backward=backward).accumulate([awkward_batch(3)])
        assert alive() == []
    shared = {"trunk", "fpn", "deep"}
    assert len(seen) == 7
    for before, after in seen:
        heads = set(before) - shared - {"loss"}
        assert len(heads) <= 1, f"graphs of several heads at once: {heads}"
        assert set(after) <= shared, f"left alive after a head's backward: {after}"
    assert seen[0][1] == ["fpn", "trunk"], "the shared graphs were to be watched too"
    assert seen[-1][1] == ["trunk"], "the necks were to be done before the trunk's other heads"


def test_after_each_task_nothing_at_all_is_alive_in_sequential_g2() -> None:
    model, seen, left = awkward_model(), [], []
    with watching(model) as alive:

        def backward(loss: Tensor) -> None:
            seen.append(alive())
            loss.backward()

        # as the next task starts: what a backward doesn't reach of a graph dies with the features
        model.trunk.register_forward_pre_hook(lambda *_: left.append(alive()))
        Engine(model, schedule="sequential", backward=backward).accumulate([awkward_batch(3)])
        left.append(alive())
    assert left == [[]] * 8
    for before in seen:
        assert "trunk" in before
        assert len(set(before) - {"trunk", "fpn", "deep", "loss"}) <= 1


def test_summed_keeps_all_heads_and_leaves_nothing_g2() -> None:
    # the baseline; and it shows that the watching sees what it should
    model, seen = awkward_model(), []
    with watching(model) as alive:

        def backward(loss: Tensor) -> None:
            seen.append(alive())
            loss.backward()

        Engine(model, schedule="summed", backward=backward).accumulate([awkward_batch(3)])
        assert alive() == []
    assert len(seen) == 1
    assert {"trunk", "fpn", "deep", "seg", "depth", "cls"} <= set(seen[0])


@schedules
def test_no_schedule_asks_to_retain_a_graph_g2(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.autograd.backward
    calls: list[Any] = []

    def watched(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, *rest: Any, **more: Any
    ) -> None:
        calls.append(retain_graph)
        real(tensors, grad_tensors, retain_graph, *rest, **more)

    monkeypatch.setattr(torch.autograd, "backward", watched)
    Engine(awkward_model(), schedule=schedule).accumulate([awkward_batch(3)])
    assert calls
    assert not any(calls)


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    """What a reference cycle holds would live until the collector comes by, on a device for many steps."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@schedules
@pytest.mark.usefixtures("_no_garbage_collection")
def test_features_and_batch_die_with_their_micro_batch_g6(schedule: str) -> None:
    # the inputs are made for each micro-batch, as those are that are moved to a device
    model = awkward_model(inputs=lambda batch: batch["image"].clone())
    features: list[weakref.ref[Tensor]] = []
    inputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def before(_module: nn.Module, given: tuple[Tensor]) -> None:
        if not inputs or inputs[-1]() is not given[0]:  # not for repeats on the same micro-batch
            alive.append(sum(ref() is not None for ref in (*features, *inputs)))
            inputs.append(weakref.ref(given[0]))

    model.trunk.register_forward_pre_hook(before)
    model.trunk.register_forward_hook(lambda _m, _i, output: features.append(weakref.ref(output["list"][0])))

    Engine(model, schedule=schedule).accumulate(split_batch(awkward_batch(6), 3))

    alive.append(sum(ref() is not None for ref in (*features, *inputs)))
    assert alive == [0] * 4


class Elsewhere:
    """A micro-batch that lies on another device: moving it makes new tensors, which are watched."""

    def __init__(self, samples: int, moved: list[weakref.ref[Tensor]], alive: list[int]) -> None:
        self.x = torch.rand(samples, 3)
        self.moved, self.alive = moved, alive

    def __len__(self) -> int:
        return len(self.x)

    def to(self, _device: torch.device) -> Elsewhere:
        self.alive.append(sum(ref() is not None for ref in self.moved))
        there = Elsewhere(0, self.moved, self.alive)
        there.x = self.x.clone()
        self.moved.append(weakref.ref(there.x))
        return there


@schedules
@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_micro_batch_is_moved_when_its_turn_comes_and_the_one_before_is_gone_g6(schedule: str) -> None:
    moved: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    model = MultiTaskModel(
        nn.Linear(3, 4), {"a": Squared(nn.Linear(4, 2)), "b": Squared(nn.Linear(4, 2))}, inputs="x"
    )
    model.trunk.register_forward_pre_hook(lambda *_: alive.append(sum(ref() is not None for ref in moved)))

    Engine(model, schedule=schedule).accumulate([Elsewhere(n, moved, alive) for n in (2, 3, 1)])

    passes = 2 if schedule == "sequential" else 1
    assert alive == [0, *[1] * passes] * 3
    assert [ref() for ref in moved] == [None] * 3


@pytest.mark.usefixtures("_no_garbage_collection")
def test_predictions_die_with_their_last_name() -> None:
    model = awkward_model()
    predictions = model(awkward_batch(2))
    ref = weakref.ref(predictions["seg"])
    del predictions
    assert ref() is None


# --- in-place operations ----------------------------------------------------------------------------------


class InplaceHead(nn.Module):
    """Starts with an operation that writes into what it was given."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.write = write
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.layer(x)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "relu": nn.ReLU(inplace=True),
    "add": lambda x: x.add_(1),
    "slice": lambda x: x[:, 0].zero_(),
    "detached": lambda x: x.detach().mul_(2),
}


@schedules
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("trunk", ["training", "frozen"])
@pytest.mark.parametrize("where", ["first", "last", "neck", "detached task"])
def test_a_head_that_writes_into_shared_features_is_refused_by_name_b2(
    schedule: str, write: str, trunk: str, where: str
) -> None:
    # With the trunk frozen PyTorch would say nothing, and the next head would see other features.
    head, other = InplaceHead(WRITES[write]), nn.Linear(4, 2)
    necks = {}
    if where == "neck":
        necks = {"bad": Neck(head)}
        tasks = {"a": Squared(nn.Linear(2, 1), on="bad"), "good": Squared(other)}
    else:
        mode = "detached" if where == "detached task" else "train"
        tasks = {"bad": Squared(head, mode=mode), "good": Squared(other)}
        tasks = dict(reversed(tasks.items())) if where == "last" else tasks
    model = MultiTaskModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), tasks, inputs="x", necks=necks)
    model.trunk.requires_grad_(trunk == "training")

    with pytest.raises(InplaceError, match="'bad' writes in place") as caught:
        Engine(model, schedule=schedule).accumulate([{"x": torch.rand(5, 3)}])

    assert "nn.ReLU()" in str(caught.value)
    assert all(gradient is None for gradient in gradients_of(model).values())


class Stack(nn.Module):
    """A trunk that hands on a list of skips, and a dict, as encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        low = torch.tanh(self.first(x))
        return {"skips": [low, torch.tanh(self.second(low))]}


class Decoder(nn.Module):
    """Takes the skips off the list and puts its own result into the dict, as decoders do."""

    def __init__(self, polite: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.polite = polite

    def forward(self, features: dict[str, Any]) -> Tensor:
        if self.polite:
            features = {"skips": list(features["skips"])}
        x = self.layer(features["skips"].pop())
        features["skips"][0] = x * features["skips"][0]
        features["out"] = features["skips"].pop()
        return features["out"]


@schedules
@pytest.mark.parametrize("neck", [False, True])
def test_a_head_that_rearranges_its_features_changes_nothing_for_others_b2(schedule: str, neck: bool) -> None:
    def model(polite: bool) -> MultiTaskModel:
        torch.manual_seed(0)
        necks = {"n": Neck(Decoder(polite))} if neck else {}
        tasks = {"a": Squared(Decoder(polite)), "b": Squared(Decoder(polite), weight=0.5)}
        if neck:
            tasks["on neck"] = Squared(nn.Linear(4, 1), on="n")
        return MultiTaskModel(Stack(), tasks, inputs="x", necks=necks).double()

    window = [{"x": torch.rand(5, 3, dtype=torch.float64)}]
    rude = model(polite=False)
    Engine(rude, schedule=schedule).accumulate(window)
    assert_close_gradients(rude, joint_reference(model(polite=True), window), 1e-12)


# --- disabled, frozen, detached ---------------------------------------------------------------------------


def two_tasks(mode: str, weight: float = 1.0) -> MultiTaskModel:
    torch.manual_seed(0)
    model = MultiTaskModel(
        nn.Linear(3, 4),
        {
            "a": Squared(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Tanh())),
            "b": Squared(nn.Linear(4, 2)),
        },
        inputs="x",
    ).double()
    model.task("a").mode = mode
    model.task("a").weight = weight
    return model


@schedules
def test_disabled_frozen_and_detached_are_three_different_things_b3(schedule: str) -> None:
    window = [{"x": torch.rand(6, 3, dtype=torch.float64)}]
    full = joint_reference(two_tasks("train"), window).gradients
    without_a = joint_reference(two_tasks("train", weight=0), window).gradients
    assert not torch.equal(full["trunk.weight"], without_a["trunk.weight"])
    # whose trunk gradient; whether a's head learns; whether its BatchNorm moves; whether it has a loss
    expected = {
        "train": (full, True, True, True),
        "frozen": (full, False, False, True),
        "detached": (without_a, True, True, True),
        "off": (without_a, False, False, False),
    }
    for mode, (trunk_gradient, learns, moves, reports) in expected.items():
        model = two_tasks(mode)
        result = Engine(model, schedule=schedule).accumulate(window)
        gradients = gradients_of(model)
        torch.testing.assert_close(
            gradients["trunk.weight"], trunk_gradient["trunk.weight"], rtol=1e-12, atol=0
        )
        for name in ("tasks.a.head.0.weight", "tasks.a.head.1.weight"):
            if learns:
                torch.testing.assert_close(gradients[name], full[name], rtol=1e-12, atol=1e-15)
            else:
                assert gradients[name] is None, (mode, name)
        norm = model.task("a").head[1]
        assert (norm.num_batches_tracked.item() == 1) is moves, mode
        assert norm.running_mean.any().item() is moves, mode
        assert ("a" in result.losses) is reports, mode
        assert all(parameter.requires_grad for parameter in model.parameters()), mode


@schedules
def test_a_weight_of_0_never_runs_the_task_b3(schedule: str) -> None:
    model = two_tasks("train", weight=0)
    passes: list[None] = []
    model.task("a").register_forward_hook(lambda *_: passes.append(None))
    result = Engine(model, schedule=schedule).accumulate([{"x": torch.rand(6, 3, dtype=torch.float64)}])
    assert passes == []
    assert set(result.losses) == {"b"}
    assert gradients_of(model.task("a")) == dict.fromkeys(gradients_of(model.task("a")))


@schedules
def test_frozen_survives_an_error_in_the_head_b3(schedule: str) -> None:
    model = two_tasks("frozen")
    model.task("a").head[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(Exception, match="division"):
        Engine(model, schedule=schedule).accumulate([{"x": torch.rand(6, 3, dtype=torch.float64)}])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.task("a").head[1].num_batches_tracked.item() == 0


@schedules
def test_a_weight_shared_with_a_frozen_head_learns_from_the_other_b3(schedule: str) -> None:
    model = two_tasks("frozen")
    frozen, learning = model.task("a").head[0], model.task("b").head
    learning.weight = frozen.weight
    window = [{"x": torch.rand(6, 3, dtype=torch.float64)}]
    only_b = two_tasks("train", weight=0)
    only_b.task("b").head.weight.data.copy_(frozen.weight)
    reference = joint_reference(only_b, window)

    Engine(model, schedule=schedule).accumulate(window)

    torch.testing.assert_close(
        learning.weight.grad, reference.gradients["tasks.b.head.weight"], rtol=1e-12, atol=1e-15
    )


@schedules
def test_a_frozen_trunk_runs_without_a_graph_b4(schedule: str) -> None:
    model = awkward_model()
    for module in (model.trunk, model.necks["fpn"]):
        module.requires_grad_(False)
    outputs: list[Tensor] = []
    model.trunk.register_forward_hook(lambda _m, _i, output: outputs.append(output["list"][0]))
    window = [awkward_batch(4)]
    seed_everything(0)
    reference = joint_reference(model, window)
    outputs.clear()

    with watching(model) as alive:
        during: list[str] = []

        def backward(loss: Tensor) -> None:
            during.extend(alive())
            loss.backward()

        seed_everything(0)
        Engine(model, schedule=schedule, backward=backward).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert not any(output.requires_grad for output in outputs)
    assert "trunk" not in during
    if schedule != "sequential":
        assert len(outputs) == 1


@schedules
def test_no_gradient_is_made_of_the_features_of_a_frozen_trunk_b4(schedule: str) -> None:
    # it would lead nowhere, and be as large as they are
    model = awkward_model()
    model.trunk.requires_grad_(False)
    given: list[bool] = []
    for name in ("fpn", "depth", "cls"):
        model.node(name).register_forward_pre_hook(
            lambda _m, args: given.extend(tensor.requires_grad for tensor in tensors_of(args[0]))
        )
    Engine(model, schedule=schedule).accumulate([awkward_batch(3)])
    assert len(given) >= 3 * 5
    assert not any(given)


def test_only_detached_tasks_leave_the_trunk_without_a_graph_b4() -> None:
    model = two_tasks("detached")
    model.task("b").mode = "detached"
    requires: list[bool] = []
    model.trunk.register_forward_hook(lambda _m, _i, output: requires.append(output.requires_grad))
    for schedule in SCHEDULE_NAMES:
        Engine(model, schedule=schedule).accumulate([{"x": torch.rand(6, 3, dtype=torch.float64)}])
    assert not any(requires)
    assert model.trunk.weight.grad is None
    assert model.task("b").head.weight.grad is not None


class Sharing(MutableMapping):  # type: ignore[type-arg]
    """Its shallow copy shares the inside with it."""

    def __init__(self, inside: dict[str, Tensor]) -> None:
        self.inside = inside

    def __getitem__(self, key: str) -> Tensor:
        return self.inside[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.inside[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inside[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inside)

    def __len__(self) -> int:
        return len(self.inside)


class Cloning(dict[str, Tensor]):
    """Keeps a copy of what it is given."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value.clone())


@pytest.mark.parametrize("container", [Sharing, Cloning])
def test_a_container_that_would_lose_gradients_at_the_cut_is_refused(container: type) -> None:
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 2)
    with pytest.raises(FeatureError, match="doesn't keep the tensors"):
        split_backward(container({"x": trunk(torch.rand(5, 3))}), {"a": lambda f: head(f["x"]).sum()})


class Checkpointed(nn.Module):
    """BatchNorm and spectral norm inside a checkpoint: they run once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
        self.inner = nn.Sequential(linear, nn.BatchNorm1d(6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        return output


def test_a_checkpoint_inside_a_repeated_node_moves_buffers_as_in_one_pass_s1() -> None:
    states = {}
    for schedule in ("summed", "sequential", "split"):
        torch.manual_seed(0)
        tasks = {name: Classification(3, head=nn.Linear(6, 3), target="y") for name in ("a", "b", "c")}
        model = MultiTaskModel(Checkpointed(), tasks, inputs="x").double()
        x = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)  # reentrant checkpoints need one
        Engine(model, schedule=schedule).accumulate([{"x": x, "y": torch.arange(5) % 3}])
        states[schedule] = {
            **dict(model.named_buffers()),
            **{f"{name}.grad": p.grad for name, p in model.named_parameters()},
        }
    for schedule in ("sequential", "split"):
        for name, value in states["summed"].items():
            torch.testing.assert_close(states[schedule][name], value, rtol=1e-12, atol=1e-14, msg=name)


class Shared(nn.Module):
    """Two modules with one buffer: the first moves it, the second reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), nn.Module()
        scale = torch.ones(())
        self.register_buffer("scale", scale)
        self.reads.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(2)
        return self.linear(x) * self.reads.scale


def test_buffers_that_modules_share_stay_shared_in_repeats() -> None:
    gradients = []
    for schedule in ("summed", "sequential", "split"):
        torch.manual_seed(0)
        tasks = {name: Classification(3, head=nn.Linear(4, 3), target="y") for name in ("a", "b")}
        model = MultiTaskModel(Shared(), tasks, inputs="x").double()
        assert model.trunk is not None
        model.trunk.reads.scale = model.trunk.scale  # .double() has made two of it
        batch = {"x": torch.rand(5, 4, dtype=torch.float64), "y": torch.arange(5) % 3}
        Engine(model, schedule=schedule).accumulate([batch])
        gradients.append(model.trunk.linear.weight.grad)
        assert model.trunk.scale == 2
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("change", [lambda f: f.requires_grad_(False), lambda f: f.detach_()])
@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_switching_a_shared_features_gradient_off_is_refused_b2(schedule: str, change: Any) -> None:
    class Changing(nn.Linear):
        def forward(self, f: Tensor) -> Tensor:
            change(f)
            return super().forward(f)

    tasks = {
        "bad": Classification(3, head=Changing(4, 3), target="y"),
        "good": Classification(3, head=nn.Linear(4, 3), target="y"),
    }
    model = MultiTaskModel(nn.Linear(4, 4), tasks, inputs="x")
    with pytest.raises(TaskError, match="bad"):
        Engine(model, schedule=schedule).accumulate([{"x": torch.rand(5, 4), "y": torch.arange(5) % 3}])


class WithShared(nn.Module):
    """A layer of its own behind a module that others run too."""

    def __init__(self, shared: nn.Module, outputs: int) -> None:
        super().__init__()
        self.shared, self.out = shared, nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.shared(x).tanh())
        return output


def test_a_module_shared_by_trunk_and_heads_moves_its_buffers_as_in_one_pass_s1() -> None:
    """Its passes in the heads are first ones, also where the trunk's is a repeat."""
    states = {}
    for schedule in ("summed", "sequential", "split"):
        torch.manual_seed(0)
        shared = nn.BatchNorm1d(4)
        tasks = {name: Classification(3, head=WithShared(shared, 3), target="y") for name in ("a", "b", "c")}
        model = MultiTaskModel(WithShared(shared, 4), tasks, inputs="x").double()
        batch = {"x": torch.rand(5, 4, dtype=torch.float64), "y": torch.arange(5) % 3}
        Engine(model, schedule=schedule).accumulate([batch])
        states[schedule] = {name: value.clone() for name, value in shared.named_buffers()}
        assert shared.num_batches_tracked == 4
    for schedule in ("sequential", "split"):
        for name, value in states["summed"].items():
            assert torch.equal(states[schedule][name], value), (schedule, name)
