"""One model in the loops of Lightning and Accelerate, against the same training by the plain joint loss.

The model has BatchNorm and dropout, and of its labels many are missing, more in some batches than in others.
It and its data are in float64.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SCHEDULE_NAMES, Reference, assert_close_gradients, seed_everything
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from mtaccum import (
    Classification,
    ConfigError,
    Engine,
    MultiTaskModel,
    OptimizerError,
    Segmentation,
    split_batch,
)

lightning = pytest.importorskip("lightning", reason="needs the extra peers")
accelerate = pytest.importorskip("accelerate", reason="needs the extra peers")
accelerate_state = pytest.importorskip("accelerate.state", reason="needs the extra peers")

# Lightning asks PyTorch in a way that newer releases of that deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")

Batch = dict[str, Tensor]


class Net(nn.Module):
    """The user's own model: (batch, 3, 8, 8) to a class and to a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        # no biases in front of BatchNorm: their gradients are rounding, of which Adam makes full steps
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(6, 6, 3, padding=1),
        )
        self.seg = nn.Sequential(
            nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)
        )
        self.cls = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, 3))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def on_tasks(net: Net) -> MultiTaskModel:
    return MultiTaskModel(
        net.backbone,
        {
            "seg": Segmentation(4, head=net.seg, weight=0.5),
            "cls": Classification(3, head=net.cls),
        },
        inputs="image",
    )


class Pictures(Dataset[Batch]):
    """Eighteen pictures. Two of the first six have a class, and five of the next; the later a picture, the
    fewer of its pixels have one."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.image = torch.randn(18, 3, 8, 8, generator=random, dtype=torch.float64)
        self.seg = torch.randint(0, 4, (18, 8, 8), generator=random)
        self.seg[torch.rand(self.seg.shape, generator=random) < torch.linspace(0, 1, 18)[:, None, None]] = 255
        self.cls = torch.randint(0, 3, (18,), generator=random)
        self.cls[[0, 1, 3, 4, 6]] = -100

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> Batch:
        return {"image": self.image[index], "seg": self.seg[index], "cls": self.cls[index]}


def make_loader() -> DataLoader[Batch]:
    """Three batches: 6, 6, 6."""
    return DataLoader(Pictures(), batch_size=6)


def joint(net: Net, window: Sequence[Batch]) -> dict[str, Tensor]:
    """The gradient of the joint loss by hand, by the names in the net; moves the net's running statistics."""
    momentum = 1 - (1 - 0.1) ** (1 / len(window)) if len(window) > 1 else 0.1
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = momentum
    seg, cls, pixels, pictures = [], [], 0, 0
    for batch in window:
        features = net.backbone(batch["image"])
        seg.append(F.cross_entropy(net.seg(features), batch["seg"], ignore_index=255, reduction="sum"))
        pixels += int((batch["seg"] != 255).sum())
        if (batch["cls"] != -100).any():
            cls.append(F.cross_entropy(net.cls(features), batch["cls"], reduction="sum"))
            pictures += int((batch["cls"] != -100).sum())
    loss = 0.5 * torch.stack(seg).sum() / pixels + torch.stack(cls).sum() / pictures
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return {name: gradient for (name, _), gradient in zip(net.named_parameters(), gradients, strict=True)}


def as_reference(net_gradients: dict[str, Tensor]) -> Reference:
    """The gradients by their names in the MultiTaskModel."""
    nodes = {"backbone": "trunk", "seg": "tasks.seg.head", "cls": "tasks.cls.head"}
    named = {
        f"{nodes[name.split('.')[0]]}.{name.partition('.')[2]}": gradient
        for name, gradient in net_gradients.items()
    }
    return Reference(named, {}, {})


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def trained_by_hand(micro_batches: int) -> Net:
    """An epoch of the plain joint loop."""
    net = make_net()
    optimizer = make_optimizer(net)
    seed_everything(5)
    for batch in make_loader():
        gradients = joint(net, split_batch(batch, micro_batches))
        for name, parameter in net.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
    return net


def assert_same_net(own: Net, wanted: Net) -> None:
    """Equal after a few steps of Adam, which divides by small numbers."""
    for (name, value), other in zip(own.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11, msg=name)
    assert not torch.equal(own.backbone[0].weight, make_net().backbone[0].weight)


all_schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
one_and_three = pytest.mark.parametrize("micro_batches", [1, 3])
recomputing = pytest.mark.parametrize("recompute", [(), ("trunk[0:3]", "seg")], ids=["kept", "recomputed"])


# --- Lightning --------------------------------------------------------------------------------------------


class Lit(lightning.LightningModule):
    """Manual optimisation: Lightning's backward and optimizer, the engine's window."""

    def __init__(self, micro_batches: int, **settings: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = make_net()
        self.micro_batches = micro_batches
        self.engine = Engine(on_tasks(self.net), backward=self.manual_backward, **settings)
        self.tolerance = 1e-12
        self.backwards = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.backwards += 1
        super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer = self.optimizers()
        before = copy.deepcopy(self.net)
        random = torch.get_rng_state()
        result = self.engine.accumulate(split_batch(batch, self.micro_batches))
        after = torch.get_rng_state()
        torch.set_rng_state(random)
        gradients = joint(before, split_batch(batch, self.micro_batches))
        assert torch.equal(torch.get_rng_state(), after)
        assert_close_gradients(self.engine.model, as_reference(gradients), self.tolerance)
        optimizer.step()
        optimizer.zero_grad()
        self.log_dict(dict(result.losses))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Lightning tells of each Trainer which devices it doesn't use."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def fit(module: Any, folder: Path, **settings: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 1, **settings},
    )
    seed_everything(5)
    trainer.fit(module, make_loader())
    return trainer


@all_schedules
@one_and_three
@recomputing
def test_lightnings_manual_optimisation_trains_as_the_joint_loss(
    schedule: str, micro_batches: int, recompute: Sequence[str], tmp_path: Path
) -> None:
    module = Lit(micro_batches, schedule=schedule, recompute=recompute)

    trainer = fit(module, tmp_path)

    assert trainer.global_step == 3
    assert_same_net(module.net, trained_by_hand(micro_batches))
    # Each head's loss goes through Lightning, once; summed: once for both. The first two pictures, which are
    # a micro-batch if there are three, have no class.
    heads = 3 * 2 * micro_batches - (micro_batches == 3)
    assert module.backwards == (3 * micro_batches if schedule == "summed" else heads)
    assert trainer.callback_metrics.keys() == {"seg", "cls"}


class Half(Lit):
    """In single precision, for Lightning to cast to half of that."""

    def __init__(self, schedule: str) -> None:
        super().__init__(3, schedule=schedule, recompute=["trunk[0:3]", "seg"])
        self.net.float()
        self.tolerance = 0.02
        self.seen: set[torch.dtype] = set()
        self.net.backbone[4].register_forward_hook(lambda *call: self.seen.add(call[2].dtype))

    def training_step(self, batch: Batch, index: int) -> None:
        super().training_step({**batch, "image": batch["image"].float()}, index)


@all_schedules
def test_lightnings_mixed_precision_is_that_of_the_engines_forwards(schedule: str, tmp_path: Path) -> None:
    module = Half(schedule)

    fit(module, tmp_path, precision="bf16-mixed")

    assert module.seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in module.net.parameters()} == {torch.float32}


class Stepping(Lit):
    """The engine steps, with Lightning's optimizer, so that Lightning counts the steps."""

    def __init__(self) -> None:
        super().__init__(3)
        self.scheduled: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.net)
        self.scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        return optimizer

    def on_fit_start(self) -> None:
        self.engine = Engine(
            on_tasks(self.net),
            self.optimizers(),
            backward=self.manual_backward,
            max_grad_norm=0.05,
            lr_scheduler=self.scheduler,
        )

    def training_step(self, batch: Batch, index: int) -> None:
        assert self.engine.step(split_batch(batch, 3)).stepped
        self.scheduled.append(self.scheduler.get_last_lr()[0])


def test_steps_of_the_engine_with_lightnings_optimizer_are_lightnings_steps_n7_n9(tmp_path: Path) -> None:
    module = Stepping()

    trainer = fit(module, tmp_path, max_steps=2, max_epochs=5)

    assert trainer.global_step == 2
    assert module.scheduled == [0.005, 0.0025]
    by_hand = make_net()
    optimizer = make_optimizer(by_hand)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    seed_everything(5)
    for batch in [*make_loader()][:2]:
        gradients = joint(by_hand, split_batch(batch, 3))
        for name, parameter in by_hand.named_parameters():
            parameter.grad = gradients[name]
        assert nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05) > 0.05
        optimizer.step()
        scheduler.step()
    assert_same_net(module.net, by_hand)


@all_schedules
def test_fabrics_backward_and_optimizer_train_as_the_joint_loss(schedule: str) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net = make_net()
    model = on_tasks(net)
    wrapped, optimizer = fabric.setup(model, make_optimizer(net))
    engine = Engine(model, schedule=schedule, backward=fabric.backward)
    seed_everything(5)

    for batch in fabric.setup_dataloaders(make_loader()):
        engine.accumulate(split_batch(batch, 3))
        optimizer.step()
        optimizer.zero_grad()

    assert_same_net(net, trained_by_hand(3))
    with pytest.raises(ConfigError):  # it wants the bare model
        Engine(wrapped)


# --- Accelerate -------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One on the CPU; its state, which is the process's, is forgotten afterwards."""
    yield accelerate.Accelerator(cpu=True, **getattr(request, "param", {}))
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_state.GradientState._reset_state()


in_twos = pytest.mark.parametrize("accelerator", [{"gradient_accumulation_steps": 2}], indirect=True)
in_half = pytest.mark.parametrize("accelerator", [{"mixed_precision": "bf16"}], indirect=True)


@all_schedules
@one_and_three
@recomputing
def test_accelerate_trains_as_the_joint_loss(
    schedule: str, micro_batches: int, recompute: Sequence[str], accelerator: Any
) -> None:
    net = make_net()
    model, optimizer, loader = accelerator.prepare(on_tasks(net), make_optimizer(net), make_loader())
    engine = Engine(model, schedule=schedule, recompute=recompute, backward=accelerator.backward)
    seed_everything(5)

    for batch in loader:
        before, random = copy.deepcopy(net), torch.get_rng_state()
        engine.accumulate(split_batch(batch, micro_batches))
        torch.set_rng_state(random)
        reference = as_reference(joint(before, split_batch(batch, micro_batches)))
        assert_close_gradients(accelerator.unwrap_model(model), reference, 1e-12)
        optimizer.step()
        optimizer.zero_grad()

    assert_same_net(net, trained_by_hand(micro_batches))


@all_schedules
def test_steps_of_the_engine_with_accelerates_optimizer_and_scheduler_n7(
    schedule: str, accelerator: Any
) -> None:
    net = make_net()
    optimizer = make_optimizer(net)
    model, prepared, loader, scheduler = accelerator.prepare(
        on_tasks(net), optimizer, make_loader(), StepLR(optimizer, step_size=1, gamma=1.0)
    )
    engine = Engine(
        model, prepared, schedule=schedule, lr_scheduler=scheduler.scheduler, backward=accelerator.backward
    )
    seed_everything(5)

    for batch in loader:
        assert engine.step(split_batch(batch, 3)).stepped

    assert_same_net(net, trained_by_hand(3))
    assert scheduler.scheduler.last_epoch == 3


@all_schedules
@recomputing
@in_twos
def test_accelerates_accumulation_divides_each_window_once_for_heads_and_trunk(
    schedule: str, recompute: Sequence[str], accelerator: Any
) -> None:
    # accelerator.backward divides each loss by its 2. Would the gradient at a cut go through it as well, the
    # trunk's would be a quarter.
    net = make_net()
    model, optimizer, loader = accelerator.prepare(on_tasks(net), make_optimizer(net), make_loader())
    engine = Engine(model, schedule=schedule, recompute=recompute, backward=accelerator.backward)
    untouched, sums = copy.deepcopy(net), dict.fromkeys(dict(net.named_parameters()), 0.0)

    for index, batch in enumerate([*loader][:2]):
        window = split_batch(batch, 3)
        with accelerator.accumulate(model):
            seed_everything(index)
            engine.accumulate(window)
            seed_everything(index)
            gradients = joint(untouched, window)
            sums = {name: sums[name] + gradient / 2 for name, gradient in gradients.items()}
            assert_close_gradients(model, as_reference(sums), 1e-12)
            if index == 0:  # Accelerate holds back the step and the clearing of the gradients
                assert not accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
                assert torch.equal(net.backbone[0].weight, make_net().backbone[0].weight)
    assert accelerator.sync_gradients


@in_twos
def test_accelerates_accumulation_is_a_mean_of_means_and_one_window_the_mean_over_all_labels_n1(
    accelerator: Any,
) -> None:
    # The first batch has two classes, the second five: Accelerate weighs each of the two by 1/4, each of the
    # five by 1/10. Given as one window, with Accelerate's accumulation at 1, each weighs 1/7.
    net = make_net().eval()  # no dropout, and nothing that couples samples
    first, second, _ = make_loader()
    assert [int((batch["cls"] != -100).sum()) for batch in (first, second)] == [2, 5]
    means = [joint(net, [batch]) for batch in (first, second)]
    mean_of_means = {name: (means[0][name] + means[1][name]) / 2 for name in means[0]}
    over_all = joint(net, [first, second])
    model = on_tasks(net)

    engine = Engine(model, backward=accelerator.backward)
    for batch in (first, second):
        with accelerator.accumulate(model):
            engine.accumulate([batch])
    assert_close_gradients(model, as_reference(mean_of_means), 1e-12)

    model.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    engine.accumulate([first, second])
    assert_close_gradients(model, as_reference(over_all), 1e-12)

    bias = "cls.3.bias"
    assert (mean_of_means[bias] - over_all[bias]).norm() > 0.05 * over_all[bias].norm()


@all_schedules
@in_half
def test_accelerates_autocast_is_that_of_the_engines_forwards(schedule: str, accelerator: Any) -> None:
    # A prepared model casts in its own forward, which the engine doesn't call: hence the autocast around it.
    net = make_net().float()
    model, optimizer, loader = accelerator.prepare(on_tasks(net), make_optimizer(net), make_loader())
    seen: set[torch.dtype] = set()
    net.backbone[4].register_forward_hook(lambda *call: seen.add(call[2].dtype))
    engine = Engine(model, schedule=schedule, recompute=["trunk[0:3]"], backward=accelerator.backward)

    for batch in loader:
        window = split_batch({**batch, "image": batch["image"].float()}, 3)
        before, random = copy.deepcopy(net), torch.get_rng_state()
        with accelerator.autocast():
            engine.accumulate(window)
            torch.set_rng_state(random)
            reference = as_reference(joint(before, window))
        assert_close_gradients(model, reference, 0.02)
        optimizer.step()
        optimizer.zero_grad()

    assert seen == {torch.bfloat16}


def test_a_training_resumed_from_accelerates_state_ends_like_the_joint_loss(
    accelerator: Any, tmp_path: Path
) -> None:
    net = make_net()
    model, optimizer, loader = accelerator.prepare(on_tasks(net), make_optimizer(net), make_loader())
    engine = Engine(model, optimizer, backward=accelerator.backward)
    seed_everything(5)
    first, second, third = loader
    for batch in (first, second):
        engine.step(split_batch(batch, 3))
    accelerator.save_state(str(tmp_path))
    for batch in (first, third):  # a training that goes astray
        engine.step([batch])

    accelerator.load_state(str(tmp_path))  # random state included
    engine.step(split_batch(third, 3))

    assert_same_net(net, trained_by_hand(3))


@in_twos
def test_a_step_that_accelerate_would_hold_back_is_refused(accelerator: Any) -> None:
    net = make_net()
    model, optimizer = accelerator.prepare(on_tasks(net), make_optimizer(net))
    with pytest.raises(OptimizerError, match=r"every 2 backwards.*gradient_accumulation_steps=1"):
        Engine(model, optimizer, backward=accelerator.backward)


@in_half
def test_accelerates_mixed_precision_does_not_pass_unsaid(accelerator: Any) -> None:
    model = accelerator.prepare(on_tasks(make_net()))
    with pytest.warns(UserWarning, match=r"forward was replaced.*precision= here"):
        Engine(model, backward=accelerator.backward)
