"""Batches that nobody here had thought of: objects of their own, tuples by sample, labels laid end to end."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import Squared
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import mtaccum
from mtaccum import (
    BatchError,
    Classification,
    ConfigError,
    Engine,
    InplaceError,
    MultiTaskModel,
    Regression,
    StepOptions,
    Task,
    TaskError,
    check_exactness,
    evaluate,
    path,
    register_split,
    split_batch,
)
from mtaccum.batch import batch_size_of, own_view, to_device


def equal(ours: Any, theirs: Any) -> bool:
    """Whether two nests hold the same values in containers of the same types."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


# --- t1: objects ------------------------------------------------------------------------------------------


class Graphs:
    """A batch object with a length and tensors inside, of which mtaccum knows nothing."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)


class Known(Graphs):
    """One that is registered."""


register_split(Known, lambda graphs, sizes: [Known(part) for part in graphs.x.split(sizes)])


@pytest.mark.parametrize(
    "batch",
    [
        Graphs(torch.rand(8, 2)),
        {"x": torch.rand(8, 3), "graphs": Graphs(torch.rand(8, 2))},
        (torch.rand(8, 3), Graphs(torch.rand(8, 2))),
        {"x": torch.rand(8, 3), "deep": {"graphs": Graphs(torch.rand(8, 2))}},
    ],
    ids=["batch", "entry of a dict", "entry of a tuple", "deeper"],
)
def test_an_object_that_hides_tensors_is_never_handed_on_whole_t1(batch: Any) -> None:
    assert batch_size_of(batch) == 8
    with pytest.raises(BatchError, match=r"Graphs holds tensors.*register_split\(Graphs.*register_structure"):
        split_batch(batch, 4)


def test_an_object_that_hides_arrays_or_an_attribute_beside_its_entries_is_refused_t1() -> None:
    @dataclass
    class Annotated:
        x: Tensor

    graphs, annotated = Graphs(torch.rand(4)), Annotated(torch.rand(4, 2))
    graphs.x = np.zeros((4, 2))  # type: ignore[assignment]
    annotated.boxes = torch.rand(4, 4)  # type: ignore[attr-defined]
    for hiding in (graphs, annotated):
        with pytest.raises(BatchError, match="holds tensors, but mtaccum can't take that type apart"):
            split_batch({"x": torch.rand(4), "more": hiding}, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_a_registered_object_is_split_as_a_batch_and_in_one_t1(nested: bool) -> None:
    known = Known(torch.arange(8.0))
    batch = {"x": torch.arange(8.0), "graphs": known} if nested else known
    parts = split_batch(batch, 3)
    found = [part["graphs"] if nested else part for part in parts]
    assert [part.x.tolist() for part in found] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_size_that_isnt_the_length_is_registered_t1() -> None:
    class Ragged:
        def __init__(self, rows: list[Tensor]) -> None:
            self.rows = rows

    def split(ragged: Ragged, sizes: list[int]) -> list[Ragged]:
        ends = np.cumsum(sizes)
        return [Ragged(ragged.rows[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    register_split(Ragged, split, size=lambda ragged: len(ragged.rows))
    batch = Ragged([torch.rand(n) for n in (3, 1, 2)])
    assert batch_size_of(batch) == 3
    assert [len(part.rows) for part in split_batch(batch, 2)] == [2, 1]
    with pytest.raises(BatchError, match="Ragged can't be split with a batch of 4 samples: it holds 3"):
        split_batch({"x": torch.rand(4), "r": batch, "y": torch.rand(4)}, 2)


def test_counts_of_a_hidden_object_are_not_multiplied_t1() -> None:
    class OnObject(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            return prediction.square().mean()

    model = MultiTaskModel(None, {"a": OnObject(nn.Linear(2, 1), None)}, inputs=lambda batch: batch.x)
    whole = Graphs(torch.rand(8, 2))
    result = Engine(model).accumulate([whole])
    assert result.counts == {"a": 8}
    with pytest.raises(BatchError, match="register_split"):
        split_batch(whole, 4)


# --- t2: tuples -------------------------------------------------------------------------------------------


def boxes(*numbers: int) -> list[Tensor]:
    return [torch.arange(4.0 * n).reshape(n, 4) + 100 * i for i, n in enumerate(numbers)]


def samples_of_detection(*numbers: int) -> list[tuple[Tensor, Any]]:
    return [
        (torch.full((3, 4, 5 + i), float(i)), {"boxes": of_image, "labels": torch.arange(len(of_image))})
        for i, of_image in enumerate(boxes(*numbers))
    ]


@pytest.mark.parametrize("numbers", [(2, 2), (3, 1), (3, 3, 3), (2, 1, 2, 5), (4, 4, 4, 4)])
def test_a_tuple_of_one_object_per_sample_is_split_by_sample_t2(numbers: tuple[int, ...]) -> None:
    images, targets = zip(*samples_of_detection(*numbers), strict=True)
    batch = images, targets
    assert batch_size_of(batch) == len(numbers)
    parts = split_batch(batch, len(numbers))
    assert all(equal(part, ((image,), (t,))) for part, image, t in zip(parts, images, targets, strict=True))
    listed = split_batch((list(images), list(targets)), len(numbers))
    assert all(equal((tuple(i), tuple(t)), part) for (i, t), part in zip(listed, parts, strict=True))


def test_a_tuple_that_may_hold_samples_or_fields_is_refused_with_how_to_say_it_t2() -> None:
    images, targets = (torch.rand(3, 4, 4), torch.rand(3, 4, 4)), tuple(boxes(2, 2))
    unclear = {"x": torch.rand(2, 3), "boxes": targets}
    with pytest.raises(BatchError, match="a tuple of 2 entries in a batch of 2 .*list.*dict"):
        split_batch(unclear, 2)
    assert equal(split_batch({**unclear, "boxes": list(targets)}, 2)[1]["boxes"], [targets[1]])
    # beside images that can't be fields they aren't either
    assert equal(split_batch((images, targets), 2)[1], ((images[1],), (targets[1],)))
    fields = split_batch({"x": torch.rand(2, 3), "y": {"a": targets[0], "b": targets[1]}}, 2)
    assert equal(fields[0]["y"], {"a": targets[0][:1], "b": targets[1][:1]})


@pytest.mark.parametrize("sequence", [list, tuple])
def test_fields_of_different_kinds_are_fields_however_many_t2(sequence: type) -> None:
    image, seg, depth = torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), torch.rand(2, 1, 4, 4)
    parts = split_batch([image, sequence([seg, depth])], 2)
    assert equal(parts[1], [image[1:], sequence([seg[1:], depth[1:]])])


def test_plain_numbers_as_many_as_samples_are_unclear_and_others_belong_to_all_t2() -> None:
    with pytest.raises(BatchError, match="may hold one entry per sample"):
        split_batch((torch.rand(3, 2), (4, 0, 1)), 3)
    assert [part[1] for part in split_batch((torch.rand(3, 2), (480, 640)), 3)] == [(480, 640)] * 3
    assert [part[1] for part in split_batch((torch.rand(2, 2), [4, 0]), 2)] == [[4], [0]]
    assert [part[1] for part in split_batch((torch.rand(2, 2), ("a", "b")), 2)] == [("a",), ("b",)]


def test_samples_that_nobody_collated_are_read_as_samples_t2() -> None:
    uncollated = samples_of_detection(3, 1, 2)
    assert batch_size_of(uncollated) == 3
    assert equal(split_batch(uncollated, 3)[1], uncollated[1:2])
    with pytest.raises(BatchError, match="may hold one entry per sample"):
        batch_size_of([(torch.rand(3, 4, 4), torch.rand(3, 4, 4)) for _ in range(5)])
    dicts = tuple({"x": torch.rand(3, 2), "y": torch.rand(3)} for _ in range(4))
    with pytest.raises(BatchError, match=r"may hold one.*list \(of dicts"):
        batch_size_of(dicts)
    assert batch_size_of(list(dicts)) == 4
    assert batch_size_of(({"x": torch.rand(8, 2)}, {"y": torch.rand(8)})) == 8


# --- t3: targets laid end to end --------------------------------------------------------------------------


class Speech(Task):
    """CTC: the labels of all samples laid end to end, their lengths beside them."""

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return prediction.square().mean()


def test_a_target_of_another_length_than_the_batch_is_no_count_t3() -> None:
    batch = {"x": torch.rand(4, 3), "labels": torch.arange(11), "lengths": torch.tensor([3, 2, 5, 1])}
    model = MultiTaskModel(nn.Linear(3, 2), {"asr": Speech(nn.Linear(2, 2), "labels")}, inputs="x")
    with pytest.raises(TaskError, match="has 11 entries in a batch of 4 samples.*Define count.*Speech"):
        Engine(model).accumulate([batch])


def test_the_size_that_most_entries_have_is_the_batchs_t3() -> None:
    batch = {"labels": torch.arange(11), "x": torch.rand(4, 3), "lengths": torch.tensor([3, 2, 5, 1])}
    assert batch_size_of(batch) == 4
    with pytest.raises(BatchError, match=r"Tensor\(11\) can't be split with a batch of 4 samples"):
        split_batch(batch, 2)


def test_a_count_of_ones_own_declares_it_t3() -> None:
    class Counted(Speech):
        def count(self, batch: Any) -> Any:
            return len(batch["lengths"])

    batch = {"x": torch.rand(4, 3), "labels": torch.arange(11), "lengths": torch.tensor([3, 2, 5, 1])}
    model = MultiTaskModel(nn.Linear(3, 2), {"asr": Counted(nn.Linear(2, 2), "labels")}, inputs="x")
    assert Engine(model).accumulate([batch]).counts == {"asr": 4}


# --- t4: a batch belongs to the caller ---------------------------------------------------------------------


class Popping(Task):
    """Takes its label out of the batch, and puts something else in."""

    def forward(self, features: Any, batch: Any) -> Any:
        batch.pop("x", None)
        batch["mine"] = 1
        return self.head(features)

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return (prediction - batch.pop("y")).square().mean()

    def count(self, batch: Any) -> Any:
        return len(batch.pop("y"))

    def update_metrics(self, metrics: Any, prediction: Tensor, batch: Any) -> None:
        batch.pop("y")


class Held(UserDict[str, Any]):
    """A batch of another library, that is a mapping."""


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
@pytest.mark.parametrize("kind", [dict, Held])
def test_tasks_may_take_labels_out_of_a_batch_t4(schedule: str, kind: type) -> None:
    torch.manual_seed(0)
    tasks = {name: Popping(nn.Linear(2, 1), "y") for name in ("a", "b")}
    model = MultiTaskModel(nn.Linear(3, 2), tasks, inputs="x")
    batch = kind({"x": torch.rand(6, 3), "y": torch.rand(6, 1)})
    before = dict(batch)
    for _ in range(2):
        assert Engine(model, schedule=schedule).accumulate([batch]).counts == {"a": 6, "b": 6}
        evaluate(model, [batch])
        assert check_exactness(model, [batch], schedule=schedule).exact
    assert dict(batch) == before
    assert all(batch[key] is before[key] for key in before)


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_a_label_that_a_task_writes_into_is_found_t4(schedule: str) -> None:
    class Clearing(Task):
        def loss(self, prediction: Tensor, batch: Any) -> Tensor:
            batch["y"][batch["y"] < 0] = 0
            return (prediction - batch["y"]).square().mean()

    model = MultiTaskModel(nn.Linear(3, 2), {"a": Clearing(nn.Linear(2, 1), "y")}, inputs="x")
    with pytest.raises(InplaceError, match="'a' writes in place into the features or the batch"):
        Engine(model, schedule=schedule).accumulate([{"x": torch.rand(4, 3), "y": torch.randn(4, 1)}])


def test_views_share_tensors_and_no_containers_t4() -> None:
    batch = {
        "x": torch.rand(2),
        "more": [{"y": torch.rand(3)}],
        "plain": (1, "a"),
        "own": Graphs(torch.rand(2)),
    }
    view = own_view(batch)
    assert view["x"] is batch["x"]
    assert view["more"][0]["y"] is batch["more"][0]["y"]
    view["more"][0].pop("y")
    view["more"].append(1)
    view["own"].x = None
    assert len(batch["more"]) == 1
    assert "y" in batch["more"][0]
    assert batch["own"].x is not None


# --- t5: rows are no fields -------------------------------------------------------------------------------


def test_a_bare_tensor_has_no_field_at_an_index_t5() -> None:
    model = MultiTaskModel(nn.Linear(3, 2), {"a": Squared(nn.Linear(2, 1))}, inputs=0)
    image = torch.rand(4, 3)
    with pytest.raises(BatchError, match=r"no entry 0; it is Tensor\(4, 3\).*model\(\(tensor,\)\)"):
        model(image)
    with pytest.raises(BatchError, match="no entry 0"):
        torch.optim.swa_utils.update_bn([image], nn.Sequential(nn.BatchNorm1d(3), Wrapped(model)))
    assert model((image,))["a"].shape == (4, 1)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


# --- t6: moving -------------------------------------------------------------------------------------------


class Moving:
    """Its ``to`` works in place, as that of some libraries does."""

    def __init__(self, x: Tensor, *, returns: bool) -> None:
        self.x, self.returns = x, returns

    def to(self, device: Any) -> Any:
        self.x = self.x.to(device)
        return self if self.returns else None


@pytest.mark.parametrize("returns", [True, False])
def test_an_object_that_moves_in_place_leaves_the_callers_t6(returns: bool) -> None:
    own = Moving(torch.rand(3), returns=returns)
    moved = to_device({"a": own}, torch.device("meta"))["a"]
    assert own.x.device.type == "cpu"
    assert moved.x.device.type == "meta"


def test_a_packed_sequence_moves_by_itself_t6() -> None:
    packed = pack_sequence([torch.rand(3, 2), torch.rand(2, 2)])
    moved = to_device((packed,), torch.device("meta"))[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"
    assert packed.data.device.type == "cpu"


def test_a_packed_sequence_is_split_by_sequence_t6() -> None:
    sequences = [torch.full((n, 2), float(n)) for n in (1, 4, 2, 4, 3)]
    batch = {"x": pack_sequence(sequences, enforce_sorted=False), "y": torch.arange(5)}
    assert batch_size_of(batch) == 5
    parts = split_batch(batch, 2)
    found = [sequence for part in parts for sequence in unpack_sequence(part["x"])]
    assert all(map(torch.equal, found, sequences))
    assert [part["y"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]


def test_what_cant_be_moved_is_refused_by_name_t6() -> None:
    with pytest.raises(BatchError, match="Graphs holds tensors"):
        to_device([Graphs(torch.rand(2))], torch.device("meta"))
    assert to_device({"name": "a"}, torch.device("meta")) == {"name": "a"}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_split_by_sample_t1(layout: Any) -> None:
    parts = [torch.rand(n, 2) for n in (2, 5, 1)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    found = split_batch({"x": nested, "y": torch.arange(3)}, 2)
    assert all(map(torch.equal, [t for part in found for t in part["x"].unbind()], parts))


# --- t7: one rule for fields -------------------------------------------------------------------------------


class Pair(NamedTuple):
    image: Tensor
    labels: dict[str, Tensor]


@pytest.mark.parametrize("kind", [lambda *values: values, lambda *values: list(values), Pair])
def test_labels_inside_of_others_are_reached_by_a_path_t7(kind: Any) -> None:
    torch.manual_seed(0)
    tasks = {
        "cls": Classification(3, head=nn.Linear(4, 3), target=path(1, "cls")),
        "value": Regression(
            2, head=nn.Linear(4, 2), target=lambda batch: batch[1]["value"], mask=path(1, "mask")
        ),
    }
    model = MultiTaskModel(nn.Linear(5, 4), tasks, inputs=path(0))
    labels = {"cls": torch.tensor([0, 1, -100, 2]), "value": torch.rand(4, 2), "mask": torch.rand(4, 2) < 0.7}
    batch = kind(torch.rand(4, 5), labels)
    result = Engine(model).accumulate(split_batch(batch, 2))
    assert result.counts == {"cls": 3, "value": int(labels["mask"].sum())}


@pytest.mark.parametrize("wrong", [1.5, None, ["a", 2.0], {"path": ["a"]}])
def test_what_says_nothing_of_a_field_is_refused_t7(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"inputs must be a key, an index, mtaccum.path"):
        MultiTaskModel(nn.Linear(2, 2), {"a": Squared(nn.Linear(2, 1))}, inputs=wrong)
    if wrong is not None:
        with pytest.raises(ConfigError, match=r"target must be a key, an index, mtaccum.path"):
            Squared(nn.Linear(2, 1), wrong)
    with pytest.raises(ConfigError, match="a path is one or more keys"):
        path()


def test_a_tuple_means_several_t7() -> None:
    class Added(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left + 10 * right

    batch = (torch.ones(2, 1), {"b": torch.full((2, 1), 2.0)})
    model = MultiTaskModel(Added(), {"a": Squared(nn.Identity())}, inputs=(0, path(1, "b")))
    assert model(batch)["a"].tolist() == [[21.0], [21.0]]
    task = Squared(nn.Identity(), (0, path(1, "b")))
    assert task.count(batch) == 2
    assert task.count((batch[0], {"b": None})) == 0


def test_the_field_that_is_missing_is_named_t7() -> None:
    with pytest.raises(BatchError, match=r"no entry path\(1, 'seg'\); it is tuple\(Tensor\(2\), \{depth: "):
        mtaccum.batch.get_field((torch.rand(2), {"depth": torch.rand(2)}), path(1, "seg"))


# --- t8: a target that isn't there -------------------------------------------------------------------------


def test_a_misspelt_target_is_warned_of_once_t8(recwarn: pytest.WarningsRecorder) -> None:
    tasks = {name: Regression(1, head=nn.Linear(2, 1), target=name) for name in ("depth", "dpeth")}
    model = MultiTaskModel(nn.Linear(3, 2), tasks, inputs="x")
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"x": torch.rand(4, 3), "depth": torch.rand(4, 1)}
    for _ in range(3):
        engine.step([batch, batch])
    said = [str(w.message) for w in recwarn if "learns nothing" in str(w.message)]
    assert len(said) == 1
    assert "task 'dpeth'" in said[0]
    assert "{x: Tensor(4, 3), depth: Tensor(4, 1)}" in said[0]


def test_a_window_without_labels_of_a_target_that_is_there_is_no_mistake_t8(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = MultiTaskModel(
        nn.Linear(3, 2), {"a": Regression(1, head=nn.Linear(2, 1), target="a")}, inputs="x"
    )
    batch = {"x": torch.rand(4, 3), "a": torch.full((4, 1), torch.nan)}
    Engine(model).accumulate([batch, {**batch, "a": None}, {"x": torch.rand(4, 3)}])
    assert not [w for w in recwarn if "learns nothing" in str(w.message)]


# --- t10: numbers are numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "half", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16)]
)
def test_numbers_of_other_libraries_are_numbers_t10(half: Any) -> None:
    task = Squared(nn.Linear(2, 1), weight=half)
    assert task.weight == 0.5
    assert type(task.weight) is float
    assert StepOptions(max_grad_norm=half) == StepOptions(max_grad_norm=0.5)


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), torch.tensor(2)])
def test_whole_numbers_of_other_libraries_are_whole_numbers_t10(two: Any) -> None:
    assert StepOptions(schedule="split", chunks={"a": two}) == StepOptions(schedule="split", chunks={"a": 2})
    assert [len(window) for window in mtaccum.windows(range(5), two)] == [2, 2, 1]
    assert len(split_batch(torch.rand(4), two)) == 2
    assert StepOptions(max_skipped=two).max_skipped == 2


@pytest.mark.parametrize("none", [True, np.True_, torch.tensor(True), "1", 1j, torch.rand(2), float("nan")])
def test_what_is_no_number_is_none_t10(none: Any) -> None:
    with pytest.raises(ConfigError, match="weight must be a finite number"):
        Squared(nn.Linear(2, 1), weight=none)
    with pytest.raises(ConfigError, match="whole number"):
        mtaccum.windows([], none)


# --- all of it, drawn -------------------------------------------------------------------------------------


@dataclass
class Labels:
    boxes: Any
    note: str


leaves = st.sampled_from(["tensor", "long", "array", "texts", "objects", "number", "text", "none", "scalar"])
containers = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
        st.tuples(st.just("named"), inner, inner),
        st.tuples(st.just("data"), inner),
        st.tuples(st.just("held"), inner, inner),
        st.tuples(st.just("tuple"), inner, inner),
    ),
    max_leaves=6,
)


def built(plan: Any, samples: int, random: torch.Generator) -> Any:
    """A nest of that many samples; every value in it differs from every other."""

    def numbers(*shape: int) -> Tensor:
        return torch.rand(samples, *shape, generator=random)

    if isinstance(plan, dict):
        return {key: built(inner, samples, random) for key, inner in plan.items()}
    if isinstance(plan, tuple):
        kind, *inner = plan
        values = [built(one, samples, random) for one in inner]
        make: Any = {
            "named": Pair,
            "data": lambda value: Labels(value, "note"),
            "held": lambda *given: Held(zip("xy", given, strict=True)),
            "tuple": lambda *given: given,
        }
        return make[kind](*values)
    return {
        "tensor": lambda: numbers(2),
        "long": lambda: numbers().mul(1000).long(),
        "array": lambda: numbers(3).numpy(),
        "texts": lambda: [f"{value:.6f}" for value in numbers().tolist()],
        "objects": lambda: [{"boxes": torch.rand(i % 3, 4)} for i in range(samples)],
        "number": lambda: 7,
        "text": lambda: "text",
        "none": lambda: None,
        "scalar": lambda: torch.tensor(2.5),
    }[plan]()


def joined(parts: list[Any]) -> Any:
    """What was split, from its parts; written for the nests above, without what splits them."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.dim() else first
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if isinstance(first, dict | UserDict):
        whole = {key: joined([part[key] for part in parts]) for key in first}
        return Held(whole) if isinstance(first, Held) else whole
    if isinstance(first, Labels):
        return Labels(joined([part.boxes for part in parts]), first.note)
    if isinstance(first, tuple):
        values = [joined(list(column)) for column in zip(*parts, strict=True)]
        return type(first)(*values) if isinstance(first, Pair) else tuple(values)
    assert all(part == first for part in parts)
    return first


@given(containers, st.integers(3, 9), st.integers(1, 9), st.integers(0, 2**20))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_split_and_joined_again_is_the_same(plan: Any, samples: int, pieces: int, seed: int) -> None:
    batch = built({"x": "tensor", "drawn": plan}, samples, torch.Generator().manual_seed(seed))
    before = copy.deepcopy(batch)
    assert batch_size_of(batch) == samples
    pieces = min(pieces, samples)
    parts = split_batch(batch, pieces)
    sizes = [batch_size_of(part) for part in parts]
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert same(joined(parts), before)
    assert same(batch, before)
    assert same(own_view(batch), before)
    assert same(to_device(batch, torch.device("cpu")), before)


def same(ours: Any, theirs: Any) -> bool:
    """``equal`` for the nests above."""
    if isinstance(ours, Held):
        return isinstance(theirs, Held) and same(dict(ours), dict(theirs))
    if isinstance(ours, Labels):
        return isinstance(theirs, Labels) and same(ours.boxes, theirs.boxes) and ours.note == theirs.note
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return equal(ours, theirs)
