"""What a step used is gone when it returns, without help by the garbage collector.

A function that calls itself by a name in its closure is a reference cycle; one of these in the step would
keep features and batches alive until a collection happens to run, and the peak would grow with tasks and K.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mtaccum import Classification, Engine, MultiTaskModel, Neck, split_backward


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watched(nn.Module):
    """Passes features on, and remembers them weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.passes = 0

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        self.passes += 1
        assert [ref() for ref in self.seen if ref() is not None] == [], "an earlier pass is still alive"
        output = self.linear(features).relu()
        self.seen.append(weakref.ref(output))
        return {"x": output}


class Take(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(features["x"])


@pytest.mark.parametrize("schedule", ["summed", "sequential", "split"])
def test_features_of_a_pass_are_gone_before_the_next_one(schedule: str) -> None:
    trunk, neck = Watched(), nn.Sequential(Take(), nn.Linear(3, 4), Watched())
    tasks = {
        "a": Classification(3, head=Take(), target="y"),
        "b": Classification(3, head=Take(), target="y", on="neck"),
        "c": Classification(3, head=Take(), target="y", on="neck"),
    }
    model = MultiTaskModel(trunk, tasks, inputs="x", necks={"neck": Neck(neck)})
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    window = [{"x": torch.rand(5, 4), "y": torch.randint(3, (5,))} for _ in range(3)]
    batches = [weakref.ref(batch["x"]) for batch in window]

    engine.step(window)
    del window

    assert len(trunk.seen) == (9 if schedule == "sequential" else 3)
    for reference in (*trunk.seen, *neck[2].seen, *batches):
        assert reference() is None


def test_split_backward_lets_go_of_the_features() -> None:
    trunk, heads = Watched(), [Take(), Take()]
    target = torch.randint(3, (5,))

    split_backward(
        lambda: trunk(torch.rand(5, 4)),
        {str(i): lambda f, head=head: F.cross_entropy(head(f), target) for i, head in enumerate(heads)},
        recompute=True,
    )

    assert trunk.passes == 2
    assert {reference() for reference in trunk.seen} == {None}
