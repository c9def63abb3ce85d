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
    LabelCounts,
    LabelError,
    MultiTaskModel,
    Regression,
    Segmentation,
    Task,
    TaskError,
    windows,
)
from mtaccum.engine.window_counts import WindowCounts
from mtaccum.parallel import SingleProcess


class Counted(Task):
    """Counts what the batch says."""

    def count(self, batch: Any) -> Any:
        return batch[self.target]

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        return prediction.mean()


def counted(target: str = "n", **settings: Any) -> Task:
    return Counted(nn.Identity(), target, **settings)


def labels_of(counts: list[Any]) -> LabelCounts:
    return LabelCounts.of({"t": counted()}, [{"n": count} for count in counts])


def counts_of(tasks: dict[str, Task], labels: LabelCounts) -> WindowCounts:
    """Label counts as a window of a single process weighs its losses by."""
    return WindowCounts.agreed(labels, MultiTaskModel(None, tasks, inputs="x"), SingleProcess())


def window_of(counts: list[Any], weight: float = 1.0) -> WindowCounts:
    return counts_of({"t": counted(weight=weight)}, labels_of(counts))


# --- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "micro_batches", "sizes"),
    [(7, 4, [4, 3]), (8, 4, [4, 4]), (3, 4, [3]), (0, 4, []), (5, 1, [1] * 5), (15, 8, [8, 7])],
)
def test_windows_hold_up_to_so_many_micro_batches_and_lose_none_n5(
    batches: int, micro_batches: int, sizes: list[int]
) -> None:
    made = list(windows(range(batches), micro_batches=micro_batches))
    assert [len(window) for window in made] == sizes
    assert [batch for window in made for batch in window] == list(range(batches))
    assert all(isinstance(window, list) for window in made)


def test_windows_read_no_batch_before_it_is_needed() -> None:
    read: list[int] = []

    def loader() -> Iterator[int]:
        for index in range(10):
            read.append(index)
            yield index

    iterator = windows(loader(), micro_batches=2)
    assert read == []
    assert next(iterator) == [0, 1]
    assert read == [0, 1]


def test_a_window_does_not_change_when_the_next_one_is_made() -> None:
    iterator = windows([1, 2, 3], micro_batches=2)
    first = next(iterator)
    next(iterator)
    assert first == [1, 2]


@pytest.mark.parametrize("micro_batches", [0, -1, 2.0, True, "2", None])
def test_what_is_no_number_of_micro_batches_is_refused_at_the_call(micro_batches: Any) -> None:
    with pytest.raises(ConfigError, match="micro_batches must be a whole number of at least 1"):
        windows([1], micro_batches=micro_batches)


# --- counts and scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 0.1, 0.3, 1 / 3, 2.5, 1e-12, 7e11, math.pi, 5e-324])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 49, 12321, 10**9 + 7])
def test_equal_counts_scale_by_exactly_weight_over_k_n3(weight: float, count: int) -> None:
    for micro_batches in range(1, 70):
        counts = window_of([count] * micro_batches, weight)
        assert {counts.scale("t", i) for i in range(micro_batches)} == {weight / micro_batches}


@pytest.mark.parametrize("class_weight", [0.1, 0.3, 1 / 3, 0.7, 5.9])
def test_equal_sums_of_class_weights_scale_by_exactly_weight_over_k_l6(class_weight: float) -> None:
    task = Classification(num_classes=2, head=nn.Identity(), class_weights=[class_weight, 1.1], weight=0.3)
    batch = {"cls": torch.tensor([0, 0, 1, 0, -100])}
    for micro_batches in range(1, 40):
        counts = counts_of({"t": task}, LabelCounts.of({"t": task}, [batch] * micro_batches))
        assert counts.scale("t", micro_batches - 1) == 0.3 / micro_batches


def test_each_label_of_10_and_100_weighs_one_110th_n1() -> None:
    counts = window_of([10, 100])
    assert counts.scale("t", 0) / 10 == pytest.approx(1 / 110, rel=1e-15)
    assert counts.scale("t", 1) / 100 == pytest.approx(1 / 110, rel=1e-15)


def test_counts_may_be_numbers_or_tensors_of_any_kind() -> None:
    labels = labels_of([3, 2.5, torch.tensor(4), torch.tensor(0.5), torch.tensor([6]), torch.tensor(True)])
    assert labels.counts == {"t": (3.0, 2.5, 4.0, 0.5, 6.0, 1.0)}
    assert labels.totals == {"t": 17.0}


def test_large_counts_are_exact() -> None:
    # float32 would lose the 1
    assert labels_of([torch.tensor(2**24), 1]).totals == {"t": 2.0**24 + 1}


def test_activity_is_by_micro_batch() -> None:
    tasks = {"a": counted("a"), "b": counted("b"), "c": counted("c")}
    window = [{"a": 1, "b": 0, "c": 0}, {"a": torch.tensor(0), "b": torch.tensor(2), "c": 0}]
    labels = LabelCounts.of(tasks, window)
    assert labels.active == (("a",), ("b",))
    assert (labels.active_in(0), labels.active_in(1)) == (("a",), ("b",))
    assert labels.active_in(2) == (), "other ranks may have more micro-batches"
    assert labels.totals == {"a": 1, "b": 2, "c": 0}


def test_disabled_tasks_are_not_counted() -> None:
    tasks = {"a": counted(), "off": counted("absent", mode="off"), "zero": counted("absent", weight=0)}
    labels = LabelCounts.of(tasks, [{"n": 1}])
    assert set(labels.counts) == {"a"}
    assert counts_of(tasks, labels).weights == {"a": 1.0}


def test_some_micro_batches_can_be_taken() -> None:
    labels = in_chunks([1, 0, 2, 4, 0], [0, 0, 7], [5]).labels
    taken = labels.take([2, 0])
    assert taken.counts == {"t": (5, 7), "whole": (5, 7)}
    assert taken.chunk_counts == {"t": ((5,), (3, 4))}
    assert taken.totals == {"t": 12, "whole": 12}


def test_an_empty_window_has_no_labels() -> None:
    labels = LabelCounts.of({"a": counted()}, [])
    assert labels.totals == {"a": 0}


def test_counts_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        labels_of([1]).counts = {}


@pytest.mark.parametrize("count", [-1, -0.5, math.nan, math.inf, torch.tensor(-1), torch.tensor(math.nan)])
def test_counts_that_can_not_be_are_refused_by_task(count: Any) -> None:
    with pytest.raises(TaskError, match=r"task 't': count\(\) gave"):
        labels_of([3, count])


@pytest.mark.parametrize("error", [RuntimeError, TypeError, KeyError, AttributeError, ValueError])
def test_a_count_that_fails_names_the_task(error: type[Exception]) -> None:
    class Broken(Counted):
        def count(self, batch: Any) -> Any:
            raise error("inside")

    with pytest.raises(TaskError, match=r"task 't': count\(\) failed.*inside"):
        LabelCounts.of({"t": Broken(nn.Identity(), None)}, [{}])


# --- chunks -----------------------------------------------------------------------------------------------


class PerSample(Task):
    """Counts what stands at each sample."""

    def count(self, batch: Any) -> Any:
        return batch[self.target].sum()


def in_chunks(*numbers: list[float], chunks: int = 2, weight: float = 1.0) -> WindowCounts:
    """Counts of two tasks on the same labels, of which one runs in chunks."""
    window = [{"n": torch.tensor(counts)} for counts in numbers]
    tasks = {"t": PerSample(nn.Identity(), "n", weight=weight), "whole": PerSample(nn.Identity(), "n")}
    return counts_of(tasks, LabelCounts.of(tasks, window, {"t": chunks}))


def test_the_chunks_of_each_micro_batch_are_counted_beforehand() -> None:
    labels = in_chunks([1, 0, 2, 4, 0], [0, 0, 7], [5], [0, 0]).labels
    assert labels.chunk_counts == {"t": ((3, 4), (0, 7), (5,), (0, 0))}
    assert labels.counts["t"] == labels.counts["whole"] == (7, 7, 5, 0)
    assert labels.totals == {"t": 19, "whole": 19}
    assert labels.active == (("t", "whole"),) * 3 + ((),)


def test_a_head_passes_once_per_chunk_or_micro_batch_with_labels() -> None:
    labels = in_chunks([1, 0, 2, 4, 0], [0, 0, 7], [5], [0, 0]).labels
    assert (labels.head_passes("t"), labels.head_passes("whole")) == (4, 3)
    assert labels.passes(["t"]) == labels.passes(["t", "whole"]) == 3


@pytest.mark.parametrize("weight", [1.0, 0.3, 1 / 3, 7e11])
def test_chunks_scale_by_their_share_of_the_windows_labels(weight: float) -> None:
    counts = in_chunks([1, 0, 2, 4, 0], [0, 0, 7], [5], weight=weight)
    labels = counts.labels
    assert counts.scale("t", 0, 1) == weight / (19 / 4)
    assert counts.scale("t", 0) == weight / (19 / 7)
    assert (labels.count("t", 0, 0), labels.count("t", 0, 1), labels.count("t", 0)) == (3, 4, 7)
    for chunks in range(1, 9):
        counts = in_chunks([2.0] * chunks, [2.0] * chunks, chunks=chunks, weight=weight)
        assert {counts.scale("t", 1, chunk) for chunk in range(chunks)} == {weight / (2 * chunks)}


def test_chunks_of_tasks_that_are_off_are_not_counted() -> None:
    task = PerSample(nn.Identity(), "absent", mode="off")
    assert LabelCounts.of({"t": task}, [{"n": torch.zeros(3)}], {"t": 2}).chunk_counts == {}


def test_ranges_of_labels_are_told_apart_from_counts_of_chunks_l5() -> None:
    tasks = {
        "two": Classification(num_classes=2, head=nn.Identity(), target="two"),
        "nine": Classification(num_classes=9, head=nn.Identity(), target="nine"),
    }
    window = [{"two": torch.tensor([0, 1, 1]), "nine": torch.tensor([8, -100, 3])}]
    labels = LabelCounts.of(tasks, window, {"two": 2, "nine": 3})
    assert labels.chunk_counts == {"two": ((2, 1),), "nine": ((1, 0, 1),)}
    window[0]["two"][2] = 8
    with pytest.raises(LabelError, match=r"'two': label 8 in micro-batch 0"):
        LabelCounts.of(tasks, window, {"two": 2, "nine": 3})


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
        LabelCounts.of({"fine": Squared(nn.Identity()), "bad": task}, [good, batch, good])
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
    assert LabelCounts.of(tasks, window).counts == {"two": (2, 0, 2), "free": (1, 1, 0), "nine": (1, 1, 0)}
    window[2]["two"] = torch.tensor([1, 8])
    with pytest.raises(LabelError, match=r"'two': label 8 in micro-batch 2"):
        LabelCounts.of(tasks, window)


@pytest.mark.parametrize("batch", [{}, {"cls": None}, {"cls": torch.zeros(0)}, {"cls": torch.tensor([-100])}])
def test_nothing_to_learn_is_never_out_of_range(batch: Any) -> None:
    assert LabelCounts.of({"t": cls()}, [batch]).totals == {"t": 0}


def test_the_range_is_checked_also_where_a_plain_number_was_counted_l5() -> None:
    class Own(Squared):
        label_limits = (0, 4)

        def label_range(self, batch: Any) -> tuple[Tensor, Tensor]:
            return batch["y"].min(), batch["y"].max()

    with pytest.raises(LabelError, match="label 5 in micro-batch 0 is out of range; valid are 0 to 4"):
        LabelCounts.of({"t": Own(nn.Identity(), "y")}, [{"y": torch.tensor([1, 5])}])
