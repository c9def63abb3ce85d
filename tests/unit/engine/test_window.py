"""Windows, and the counts that are known before the first forward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import Squared
from torch import Tensor, nn

from mtaccum import (
    Classification,
    ConfigError,
    LabelError,
    Regression,
    Segmentation,
    Task,
    TaskError,
    WindowPlan,
    windows,
)


class Counted(Task):
    """Counts what the batch says."""

    def count(self, batch: Any) -> Any:
        return batch[self.target]

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return prediction.mean()


def counted(target: str = "n", **settings: Any) -> Task:
    return Counted(nn.Identity(), target, **settings)


def plan_of(counts: list[Any], weight: float = 1.0) -> WindowPlan:
    return WindowPlan.of({"t": counted(weight=weight)}, [{"n": count} for count in counts])


# --- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "group", "sizes"),
    [(7, 4, [4, 3]), (8, 4, [4, 4]), (3, 4, [3]), (0, 4, []), (5, 1, [1] * 5), (15, 8, [8, 7])],
)
def test_windows_hold_up_to_group_batches_and_lose_none_n5(
    batches: int, group: int, sizes: list[int]
) -> None:
    grouped = list(windows(range(batches), group=group))
    assert [len(window) for window in grouped] == sizes
    assert [batch for window in grouped for batch in window] == list(range(batches))
    assert all(isinstance(window, list) for window in grouped)


def test_windows_read_no_batch_before_it_is_needed() -> None:
    read: list[int] = []

    def loader() -> Iterator[int]:
        for index in range(10):
            read.append(index)
            yield index

    iterator = windows(loader(), group=2)
    assert read == []
    assert next(iterator) == [0, 1]
    assert read == [0, 1]


def test_a_window_does_not_change_when_the_next_one_is_made() -> None:
    iterator = windows([1, 2, 3], group=2)
    first = next(iterator)
    next(iterator)
    assert first == [1, 2]


@pytest.mark.parametrize("group", [0, -1, 2.0, True, "2", None])
def test_a_group_that_is_no_number_of_batches_is_refused_at_the_call(group: Any) -> None:
    with pytest.raises(ConfigError, match="group must be a whole number of at least 1"):
        windows([1], group=group)


# --- counts and scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 0.1, 0.3, 1 / 3, 2.5, 1e-12, 7e11, math.pi, 5e-324])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 49, 12321, 10**9 + 7])
def test_equal_counts_scale_by_exactly_weight_over_k_n3(weight: float, count: int) -> None:
    for micro_batches in range(1, 70):
        plan = plan_of([count] * micro_batches, weight)
        assert {plan.scale("t", i) for i in range(micro_batches)} == {weight / micro_batches}


@pytest.mark.parametrize("class_weight", [0.1, 0.3, 1 / 3, 0.7, 5.9])
def test_equal_sums_of_class_weights_scale_by_exactly_weight_over_k_l6(class_weight: float) -> None:
    task = Classification(num_classes=2, head=nn.Identity(), class_weights=[class_weight, 1.1], weight=0.3)
    batch = {"cls": torch.tensor([0, 0, 1, 0, -100])}
    for micro_batches in range(1, 40):
        plan = WindowPlan.of({"t": task}, [batch] * micro_batches)
        assert plan.scale("t", micro_batches - 1) == 0.3 / micro_batches


def test_each_label_of_10_and_100_weighs_one_110th_n1() -> None:
    plan = plan_of([10, 100])
    assert plan.scale("t", 0) / 10 == pytest.approx(1 / 110, rel=1e-15)
    assert plan.scale("t", 1) / 100 == pytest.approx(1 / 110, rel=1e-15)


def test_counts_may_be_numbers_or_tensors_of_any_kind() -> None:
    plan = plan_of([3, 2.5, torch.tensor(4), torch.tensor(0.5), torch.tensor([6]), torch.tensor(True)])
    assert plan.counts == {"t": (3.0, 2.5, 4.0, 0.5, 6.0, 1.0)}
    assert plan.totals == {"t": 17.0}


def test_large_counts_are_exact() -> None:
    # float32 would lose the 1
    assert plan_of([torch.tensor(2**24), 1]).totals == {"t": 2.0**24 + 1}


def test_activity_is_by_micro_batch() -> None:
    tasks = {"a": counted("a"), "b": counted("b"), "c": counted("c")}
    window = [{"a": 1, "b": 0, "c": 0}, {"a": torch.tensor(0), "b": torch.tensor(2), "c": 0}]
    plan = WindowPlan.of(tasks, window)
    assert plan.active(0) == ["a"]
    assert plan.active(1) == ["b"]
    assert plan.totals == {"a": 1, "b": 2, "c": 0}


def test_disabled_tasks_are_not_counted() -> None:
    tasks = {"a": counted(), "off": counted("absent", mode="off"), "zero": counted("absent", weight=0)}
    plan = WindowPlan.of(tasks, [{"n": 1}])
    assert set(plan.counts) == {"a"}
    assert plan.weights == {"a": 1.0}


def test_an_empty_window_has_no_labels() -> None:
    plan = WindowPlan.of({"a": counted()}, [])
    assert plan.totals == {"a": 0}


def test_a_plan_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of([1]).counts = {}


@pytest.mark.parametrize("count", [-1, -0.5, math.nan, math.inf, torch.tensor(-1), torch.tensor(math.nan)])
def test_counts_that_can_not_be_are_refused_by_task(count: Any) -> None:
    with pytest.raises(TaskError, match=r"task 't': count\(\) gave"):
        plan_of([3, count])


@pytest.mark.parametrize("error", [RuntimeError, TypeError, KeyError, AttributeError, ValueError])
def test_a_count_that_fails_names_the_task(error: type[Exception]) -> None:
    class Broken(Counted):
        def count(self, batch: Any) -> Any:
            raise error("inside")

    with pytest.raises(TaskError, match=r"task 't': count\(\) failed.*inside"):
        WindowPlan.of({"t": Broken(nn.Identity(), None)}, [{}])


# --- chunks -----------------------------------------------------------------------------------------------


class PerSample(Task):
    """Counts what stands at each sample."""

    def count(self, batch: Any) -> Any:
        return batch[self.target].sum()


def in_chunks_plan(*numbers: list[float], chunks: int = 2, weight: float = 1.0) -> WindowPlan:
    window = [{"n": torch.tensor(counts)} for counts in numbers]
    tasks = {"t": PerSample(nn.Identity(), "n", weight=weight), "whole": PerSample(nn.Identity(), "n")}
    return WindowPlan.of(tasks, window, {"t": chunks})


def test_the_chunks_of_each_micro_batch_are_counted_beforehand() -> None:
    plan = in_chunks_plan([1, 0, 2, 4, 0], [0, 0, 7], [5], [0, 0])
    assert plan.parts == {"t": ((3, 4), (0, 7), (5,), (0, 0))}
    assert plan.counts["t"] == plan.counts["whole"] == (7, 7, 5, 0)
    assert plan.totals == {"t": 19, "whole": 19}
    assert [plan.active(index) for index in range(4)] == [["t", "whole"]] * 3 + [[]]


def test_a_head_passes_once_per_chunk_or_micro_batch_with_labels() -> None:
    plan = in_chunks_plan([1, 0, 2, 4, 0], [0, 0, 7], [5], [0, 0])
    assert (plan.head_passes("t"), plan.head_passes("whole")) == (4, 3)
    assert plan.passes(["t"]) == plan.passes(["t", "whole"]) == 3


@pytest.mark.parametrize("weight", [1.0, 0.3, 1 / 3, 7e11])
def test_chunks_scale_by_their_share_of_the_windows_labels(weight: float) -> None:
    plan = in_chunks_plan([1, 0, 2, 4, 0], [0, 0, 7], [5], weight=weight)
    assert plan.scale("t", 0, 1) == weight / (19 / 4)
    assert plan.scale("t", 0) == weight / (19 / 7)
    assert (plan.count("t", 0, 0), plan.count("t", 0, 1), plan.count("t", 0)) == (3, 4, 7)
    for chunks in range(1, 9):
        plan = in_chunks_plan([2.0] * chunks, [2.0] * chunks, chunks=chunks, weight=weight)
        assert {plan.scale("t", 1, chunk) for chunk in range(chunks)} == {weight / (2 * chunks)}


def test_chunks_of_tasks_that_are_off_are_not_counted() -> None:
    task = PerSample(nn.Identity(), "absent", mode="off")
    assert WindowPlan.of({"t": task}, [{"n": torch.zeros(3)}], {"t": 2}).parts == {}


def test_ranges_of_labels_are_told_apart_from_counts_of_chunks_l5() -> None:
    tasks = {
        "two": Classification(num_classes=2, head=nn.Identity(), target="two"),
        "nine": Classification(num_classes=9, head=nn.Identity(), target="nine"),
    }
    window = [{"two": torch.tensor([0, 1, 1]), "nine": torch.tensor([8, -100, 3])}]
    plan = WindowPlan.of(tasks, window, {"two": 2, "nine": 3})
    assert plan.parts == {"two": ((2, 1),), "nine": ((1, 0, 1),)}
    window[0]["two"][2] = 8
    with pytest.raises(LabelError, match=r"'two': label 8 in micro-batch 0"):
        WindowPlan.of(tasks, window, {"two": 2, "nine": 3})


# --- ranges -----------------------------------------------------------------------------------------------


def cls(**settings: Any) -> Task:
    return Classification(num_classes=3, head=nn.Identity(), **settings)


@pytest.mark.parametrize(
    ("task", "batch", "value", "valid"),
    [
        (cls(), {"cls": torch.tensor([0, 3, 1])}, 3, "0 to 2, or -100"),
        (cls(), {"cls": torch.tensor([0, -1, -100])}, -1, "0 to 2, or -100"),
        (cls(class_weights=[1, 2, 3]), {"cls": torch.tensor([7])}, 7, "0 to 2"),
        (
            Segmentation(num_classes=3, head=nn.Identity(), target="cls"),
            {"cls": torch.full((2, 4, 4), 254)},
            254,
            "0 to 2, or 255",
        ),
    ],
)
def test_a_label_out_of_range_names_task_value_and_range_l5(
    task: Task, batch: Any, value: int, valid: str
) -> None:
    good = {"cls": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(LabelError) as caught:
        WindowPlan.of({"fine": Squared(nn.Identity()), "bad": task}, [good, batch, good])
    message = str(caught.value)
    assert "task 'bad'" in message
    assert f"label {value} in micro-batch 1" in message
    assert valid in message


def test_each_task_is_held_against_its_own_labels_l5() -> None:
    # the bounds of all tasks are read in one go; this would see them mixed up
    tasks = {
        "two": Classification(num_classes=2, head=nn.Identity(), target="two"),
        "free": Regression(head=nn.Identity(), target="free"),
        "nine": Classification(num_classes=9, head=nn.Identity(), target="nine"),
    }
    window = [
        {"two": torch.tensor([0, 1]), "free": torch.tensor([1e6]), "nine": torch.tensor([8, -100])},
        {"free": torch.tensor([-50.0, math.nan]), "nine": torch.tensor([7])},
        {"two": torch.tensor([1, -100, 1]), "nine": None},
    ]
    assert WindowPlan.of(tasks, window).counts == {"two": (2, 0, 2), "free": (1, 1, 0), "nine": (1, 1, 0)}
    window[2]["two"] = torch.tensor([1, 8])
    with pytest.raises(LabelError, match=r"'two': label 8 in micro-batch 2"):
        WindowPlan.of(tasks, window)


@pytest.mark.parametrize("batch", [{}, {"cls": None}, {"cls": torch.zeros(0)}, {"cls": torch.tensor([-100])}])
def test_nothing_to_learn_is_never_out_of_range(batch: Any) -> None:
    assert WindowPlan.of({"t": cls()}, [batch]).totals == {"t": 0}


def test_the_range_is_checked_also_where_a_plain_number_was_counted_l5() -> None:
    class Own(Squared):
        label_limits = (0, 4)

        def label_range(self, batch: Any) -> tuple[Tensor, Tensor]:
            return batch["y"].min(), batch["y"].max()

    with pytest.raises(LabelError, match="label 5 in micro-batch 0 is out of range; valid are 0 to 4"):
        WindowPlan.of({"t": Own(nn.Identity(), "y")}, [{"y": torch.tensor([1, 5])}])
