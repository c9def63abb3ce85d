"""Metrics on several ranks are those of one process, wherever the labels are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import plain_batch, plain_model
from pool import Pool
from ranked import Windows, batch, made, tree
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC

from mtaccum import MultiTaskModel, Regression, evaluate
from mtaccum.parallel import Collectives, current_ranks

kinds = pytest.mark.parametrize("kind", ["ddp", "fsdp"])

CASES: dict[str, Windows] = {
    "equal": [[batch(1), batch(2)], [batch(3), batch(4)]],
    "unequal": [[batch(1)], [batch(2, samples=1), batch(3), batch(4)], [batch(5), batch(6)]],
    "no_sample_on_one_rank": [[batch(1)], [], [batch(2)]],
    "no_sample_on_rank_0": [[], [batch(2), batch(3)]],
    "no_label_of_some_tasks_on_one_rank": [
        [batch(1, without=["seg", "cls", "pair"])],
        [batch(2), batch(3, without=["five"])],
        [batch(4, without=["last", "cls"])],
    ],
    "no_label_of_some_tasks_anywhere": [
        [batch(1, without=["seg", "pair"])],
        [batch(2, without=["seg", "pair"])],
    ],
}


def metrics(kind: str, batches: Windows) -> Any:
    model = made(tree, kind)
    trained = model.training, model.trunk.norm.training  # type: ignore[union-attr]
    found = evaluate(model, batches[current_ranks().rank])
    assert trained == (model.training, model.trunk.norm.training)  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("case", CASES)
@kinds
def test_metrics_are_those_of_one_process(pool: Pool, kind: str, case: str) -> None:
    batches = CASES[case]

    found = pool.run(metrics, kind, batches, ranks=len(batches))

    one = evaluate(tree(), [batch for of_rank in batches for batch in of_rank])
    assert {"loss", "accuracy"} <= one["cls"].keys()
    assert ("miou" in one["seg"]) is (case != "no_label_of_some_tasks_anywhere")
    for evaluation in found:
        assert evaluation == found[0]
        assert evaluation.keys() == one.keys()
        for task, expected in one.items():
            # torchmetrics adds up in single precision
            assert evaluation[task] == pytest.approx(expected, rel=1e-6), task
            if "loss" in expected:
                assert evaluation[task]["loss"] == pytest.approx(expected["loss"], rel=1e-12)


class Ranked(Regression):
    """A metric that keeps all predictions, and labels of another dtype, in lists."""

    def metrics(self) -> dict[str, Metric]:
        return {"auroc": BinaryAUROC()}

    def update_metrics(self, metrics: Any, prediction: Tensor, batch: Any) -> None:
        metrics["auroc"].update(prediction[:, 0].sigmoid(), (batch["y"][:, 0] > 0.5).long())


def model_with_lists() -> MultiTaskModel:
    torch.manual_seed(0)
    return MultiTaskModel(None, {"y": Ranked(1, head=nn.Linear(4, 1), target="y")}, inputs="x")


def lists(of_ranks: Windows) -> Any:
    return evaluate(model_with_lists(), of_ranks[current_ranks().rank])


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_metrics_with_lists_are_those_of_one_process_where_a_rank_has_none(pool: Pool, empty: int) -> None:
    torch.manual_seed(1)
    given: Windows = [[{"x": torch.rand(5, 4), "y": torch.rand(5, 1)}] for _ in range(3)]
    given[empty].clear()
    expected = evaluate(model_with_lists(), [batch for of_rank in given for batch in of_rank])
    for found in pool.run(lists, given, ranks=3):
        assert found["y"] == pytest.approx(expected["y"], rel=1e-6)


def by_itself() -> Any:
    rank = current_ranks().rank
    return evaluate(plain_model(), [plain_batch(3, seed=rank)] * (rank + 1), Collectives())


def test_a_rank_may_evaluate_by_itself(pool: Pool) -> None:
    for rank, evaluation in enumerate(pool.run(by_itself, ranks=3)):
        assert evaluation == evaluate(plain_model(), [plain_batch(3, seed=rank)] * (rank + 1))
