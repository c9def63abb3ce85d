"""Errors of somebody's own data set are explained."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from mtaccum import BatchError
from mtaccum.data import loaded


def test_batches_pass_through() -> None:
    assert [batch.tolist() for batch in loaded(DataLoader(range(5), batch_size=2))] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    "samples", [[{"x": 1, "y": 2}, {"x": 1}], [{"x": None}], [torch.rand(2), torch.rand(3)]]
)
def test_samples_that_make_no_batch_are_explained(samples: list[object]) -> None:
    with pytest.raises(BatchError, match=r"loading a batch failed.*NaN \(regression\).*collate_fn"):
        list(loaded(DataLoader(samples, batch_size=2)))  # type: ignore[arg-type]
