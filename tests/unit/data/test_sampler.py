"""The sampler: every sample once, batches cut evenly, one order for every K."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from mtaccum import ConfigError, windows
from mtaccum.data import MicroBatchSampler


def epoch(sampler: MicroBatchSampler) -> list[list[list[int]]]:
    return list(
        windows(
            DataLoader(range(sampler.samples), batch_sampler=sampler, collate_fn=list), sampler.accumulate
        )
    )


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("samples", [6, 24, 25, 29])
def test_windows_are_the_batches_whatever_k(samples: int, accumulate: int) -> None:
    reference = epoch(MicroBatchSampler(samples, 6, seed=3))
    found = epoch(MicroBatchSampler(samples, 6, accumulate, seed=3))

    assert [sum(window, []) for window in found] == [sum(window, []) for window in reference]
    assert sorted(sum(sum(found, []), [])) == list(range(samples))
    for window in found:
        sizes = [len(micro_batch) for micro_batch in window]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= -(-6 // accumulate)
    assert len(found[0]) == accumulate
    assert len(MicroBatchSampler(samples, 6, accumulate)) == sum(len(window) for window in found)


def test_batch_of_64_in_5() -> None:
    (window,) = epoch(MicroBatchSampler(64, 64, 5))
    assert [len(micro_batch) for micro_batch in window] == [13, 13, 13, 13, 12]


def test_the_short_batch_at_the_end_is_a_window_of_its_own_n5() -> None:
    found = epoch(MicroBatchSampler(27, 8, 4))
    assert [[len(micro_batch) for micro_batch in window] for window in found] == [[2] * 4] * 3 + [[2, 1]]
    assert sorted(sum(sum(found, []), [])) == list(range(27))


def test_1000_samples_in_batches_of_10_and_k_2() -> None:
    found = epoch(MicroBatchSampler(1000, 10, 2))
    assert len(found) == 100
    assert sum(map(len, found)) == 200


def test_seek_goes_on_where_it_was() -> None:
    sampler = MicroBatchSampler(25, 6, 2, seed=1)
    sampler.seek(epoch=4)
    whole = epoch(sampler)
    sampler.seek(epoch=4, first_sample=3 * 6)

    assert epoch(sampler) == whole[3:]
    sampler.seek(epoch=5)
    assert epoch(sampler) != whole


def test_each_seed_and_epoch_has_an_order_of_its_own_which_never_changes() -> None:
    """A run that is resumed by a later version goes on with the samples that are left."""
    orders = {}
    for seed in range(5):
        for number in range(5):
            sampler = MicroBatchSampler(30, 30, seed=seed)
            sampler.seek(number)
            (orders[seed, number],) = list(sampler)
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            assert orders[seed, number] == torch.randperm(30, generator=generator).tolist()
    assert len({tuple(order) for order in orders.values()}) == 25


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2), (1, 1)])
def test_other_ranks_go_on_with_the_samples_that_are_left_r1(before: int, after: int) -> None:
    def on(ranks: int, first_sample: int) -> list[list[list[int]]]:
        samplers = [MicroBatchSampler(47, 4, 2, seed=1, rank=rank, ranks=ranks) for rank in range(ranks)]
        for sampler in samplers:
            sampler.seek(2, first_sample)
        batches = [[sum(window, []) for window in epoch(sampler)] for sampler in samplers]
        return [
            [of_rank[step] for of_rank in batches if step < len(of_rank)] for step in range(len(batches[0]))
        ]

    whole = [sum(step, []) for step in on(before, 0)]
    first_sample = sum(map(len, whole[:3]))
    rest = [sum(step, []) for step in on(after, first_sample)]

    assert sum(whole[:3], []) + sum(rest, []) == sum(whole, [])
    assert {len(step) for step in rest[:-1]} == {4 * after}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 4), "0 samples"),
        ((10, 0), "batch_size"),
        ((10, 4, 0), "accumulate"),
        ((10, 4, 5), "accumulate=4"),
        ((3, 64, 5), "the data set"),
    ],
)
def test_errors(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MicroBatchSampler(*arguments)
