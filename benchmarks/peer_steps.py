"""Forward and backward of one micro-batch as each peer does it.

A peer sets up what it needs, and hands its step to ``use``, which runs it as often as it likes. It is not the
other way round because of Lightning, in which only the Trainer calls the step.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mtaccum import Engine, MultiTaskModel, split_backward

__all__ = ["BASELINE", "PEERS", "Peer", "Step", "Use", "summed_by_hand"]

Step = Callable[[], object]
Use = Callable[[Step], object]
Losses = dict[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Peer:
    """A way of getting the gradients of all losses.

    Attributes:
        title: its name for people.
        run: sets the peer up for a case, and hands its step to the function given.
        library: what has to be installed, by its name on PyPI.
    """

    title: str
    run: Callable[[Case, Use], None]
    library: str | None = None


def losses_of(model: MultiTaskModel, batch: dict[str, Tensor]) -> Losses:
    """Each task's loss as a function of the features: the same for all peers."""

    def loss(head: nn.Module, labels: Tensor, features: Tensor) -> Tensor:
        return F.cross_entropy(head(features), labels)

    tasks = model.tasks_by_name().items()
    return {name: partial(loss, task.head, batch[name]) for name, task in tasks}


def trunk_of(model: MultiTaskModel) -> nn.Module:
    assert model.trunk is not None
    return model.trunk


def sum_of_losses(model: MultiTaskModel, batch: dict[str, Tensor]) -> Tensor:
    """All forwards, and the loss that a multi-task loop usually has: their sum."""
    features = trunk_of(model)(batch["image"])
    return torch.stack([loss(features) for loss in losses_of(model, batch).values()]).sum()


# --- by hand ----------------------------------------------------------------------------------------------


def summed_by_hand(case: Case) -> None:
    """The baseline."""
    sum_of_losses(case.model, case.batch).backward()  # type: ignore[no-untyped-call]


def _summed(case: Case, use: Use) -> None:
    use(partial(summed_by_hand, case))


def _retaining(case: Case, use: Use) -> None:
    def step() -> dict[str, Tensor]:
        features = trunk_of(case.model)(case.batch["image"])
        logged = {}
        for name, loss_of in losses_of(case.model, case.batch).items():
            loss = loss_of(features)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            logged[name] = loss.detach()
        return logged

    use(step)


# --- TorchJD ----------------------------------------------------------------------------------------------


def _torchjd(chunk_size: int | None, case: Case, use: Use) -> None:
    autojac: Any = import_module("torchjd.autojac")
    if not hasattr(autojac, "jac_to_grad"):  # before that, mtl_backward took the aggregator
        raise ImportError("this needs TorchJD 0.9 or later")
    aggregator = import_module("torchjd.aggregation").Sum()

    def step() -> None:
        trunk = trunk_of(case.model)
        features = trunk(case.batch["image"])
        losses = [loss(features) for loss in losses_of(case.model, case.batch).values()]
        autojac.mtl_backward(losses, features=features, parallel_chunk_size=chunk_size)
        autojac.jac_to_grad(trunk.parameters(), aggregator)

    use(step)


# --- Lightning --------------------------------------------------------------------------------------------


def _lightning(with_engine: bool, case: Case, use: Use) -> None:
    lightning: Any = import_module("lightning.pytorch")
    # It tells of each Trainer which devices it doesn't use.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = case.model
            self.engine = Engine(case.model, backward=self.manual_backward) if with_engine else None

        def training_step(self, batch: dict[str, Tensor], index: int) -> None:
            # Clearing gradients and the optimizer's step would be here, the same for all peers.
            use(partial(self.forward_and_backward, batch))

        def forward_and_backward(self, batch: dict[str, Tensor]) -> None:
            if self.engine is not None:
                self.engine.accumulate([batch])
            else:
                self.manual_backward(sum_of_losses(self.model, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    device = case.model.device
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer = lightning.Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1 if device.type == "cpu" else [device.index or 0],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(), DataLoader([case.batch], batch_size=None))  # type: ignore[arg-type]


# --- Accelerate -------------------------------------------------------------------------------------------


def _accelerate(case: Case, use: Use) -> None:
    accelerate: Any = import_module("accelerate")
    # The case is on its device already, which may be another one than Accelerate would choose.
    accelerator = accelerate.Accelerator(cpu=case.model.device.type == "cpu", device_placement=False)
    model = accelerator.prepare(case.model)
    use(lambda: accelerator.backward(sum_of_losses(model, case.batch)))


# --- mtaccum ----------------------------------------------------------------------------------------------


def _split(recompute: bool, case: Case, use: Use) -> None:
    def step() -> dict[str, Tensor]:
        trunk, image = trunk_of(case.model), case.batch["image"]
        losses = losses_of(case.model, case.batch)
        return split_backward(partial(trunk, image), losses, recompute=recompute)

    use(step)


def _engine(schedule: str, case: Case, use: Use) -> None:
    engine = Engine(case.model, schedule=schedule)
    use(partial(engine.accumulate, [case.batch]))


BASELINE = "summed"
PEERS = {
    BASELINE: Peer("by hand: losses summed", _summed),
    "retaining": Peer("by hand: backward(retain_graph=True) per task", _retaining),
    "torchjd": Peer("TorchJD: mtl_backward, Sum", partial(_torchjd, None), "torchjd"),
    "torchjd-1": Peer("TorchJD: the same, parallel_chunk_size=1", partial(_torchjd, 1), "torchjd"),
    "lightning": Peer("Lightning, manual: losses summed", partial(_lightning, False), "lightning"),
    "lightning-engine": Peer("Lightning, manual: mtaccum's Engine", partial(_lightning, True), "lightning"),
    "accelerate": Peer("Accelerate: losses summed", _accelerate, "accelerate"),
    "split": Peer("mtaccum: split_backward", partial(_split, False)),
    "recomputed": Peer("mtaccum: split_backward, recompute=True", partial(_split, True)),
    "sequential": Peer("mtaccum: Engine, sequential", partial(_engine, "sequential")),
}
