"""Trunks and heads as timm and torchvision build them, against a joint backward written by hand.

Weights are random and in float64. The reference shares nothing with the engine but the modules: it runs them
as anyone would, keeps the graphs of all micro-batches, and calls backward once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SCHEDULE_NAMES, Reference, assert_close_gradients, assert_equal_states, seed_everything
from torch import Tensor, nn

from mtaccum import (
    Classification,
    Engine,
    MultiTaskModel,
    Regression,
    Segmentation,
    TaskError,
    split_backward,
    split_batch,
)
from mtaccum.memory import measure_peak

timm = pytest.importorskip("timm", reason="needs the extra vision")
resnet = pytest.importorskip("torchvision.models.resnet", reason="needs the extra vision")
getter = pytest.importorskip("torchvision.models._utils", reason="needs the extra vision")
deeplabv3 = pytest.importorskip("torchvision.models.segmentation.deeplabv3", reason="needs the extra vision")
fcn = pytest.importorskip("torchvision.models.segmentation.fcn", reason="needs the extra vision")
extraction = pytest.importorskip("torchvision.models.feature_extraction", reason="needs the extra vision")

CLASSES, SIZE = 4, 32
Batch = dict[str, Tensor]
Sums = dict[str, tuple[Tensor, int]]
"""For each task that has labels in a micro-batch: the sum of its label losses, and how many labels."""


def batch_of(samples: int, stride: int, seed: int = 1) -> Batch:
    """Images with labels at 1/stride of their size. From the fifth sample on there is no class, the second
    has no depth, and much of the first sample's segmentation and bits of all are ignored."""
    random = torch.Generator().manual_seed(seed)
    size = SIZE // stride
    seg = torch.randint(0, CLASSES, (samples, size, size), generator=random)
    seg[torch.rand(seg.shape, generator=random) < 0.2] = 255
    seg[0, : size // 2] = 255
    depth = torch.randn(samples, 1, size, size, generator=random, dtype=torch.float64)
    depth[1] = torch.nan
    cls = torch.randint(0, CLASSES, (samples,), generator=random)
    cls[4:] = -100
    image = torch.randn(samples, 3, SIZE, SIZE, generator=random, dtype=torch.float64)
    return {"image": image, "seg": seg, "depth": depth, "cls": cls}


def class_sums(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, int]:
    total = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
    return total, int((labels != ignored).sum())


def l1_sums(prediction: Tensor, target: Tensor) -> tuple[Tensor, int]:
    known = ~target.isnan()
    return (prediction[known] - target[known]).abs().sum(), int(known.sum())


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its batches, and one micro-batch of its joint forward by hand."""

    build: Callable[[], MultiTaskModel]
    stride: int
    weights: Mapping[str, float]
    forward: Callable[[MultiTaskModel, Batch], Sums]

    def model(self) -> MultiTaskModel:
        return copy.deepcopy(built(self.build))

    def window(self, micro_batches: int, samples: int = 7) -> list[Batch]:
        return split_batch(batch_of(samples, self.stride), micro_batches)


@cache
def built(build: Callable[[], MultiTaskModel]) -> MultiTaskModel:
    torch.manual_seed(0)
    return build().double()


def joint(case: Case, model: MultiTaskModel, window: Sequence[Batch]) -> Reference:
    """All forwards, sum of weight * (sum of label losses) / (their number), one backward, on a copy."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d) and len(window) > 1:  # statistics move as far as in one pass
            layer.momentum = 1 - (1 - layer.momentum) ** (1 / len(window))
    micro_batches = [case.forward(model, batch) for batch in window]
    means = {}
    for name in case.weights:
        sums = [micro_batch[name] for micro_batch in micro_batches if name in micro_batch]
        means[name] = torch.stack([total for total, _ in sums]).sum() / sum(number for _, number in sums)
    torch.stack([case.weights[name] * mean for name, mean in means.items()]).sum().backward()
    return Reference(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: mean.detach() for name, mean in means.items()},
        dict(model.named_buffers()),
    )


@cache
def expected(case: Case, micro_batches: int) -> Reference:
    model, window = case.model(), case.window(micro_batches)
    seed_everything(5)
    return joint(case, model, window)


def check(case: Case, schedule: str, micro_batches: int, recompute: Sequence[str]) -> None:
    """Gradients, losses and buffers of a window are those of the joint backward."""
    reference, model = expected(case, micro_batches), case.model()
    seed_everything(5)

    result = Engine(model, schedule=schedule, recompute=recompute).accumulate(case.window(micro_batches))

    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), reference.buffers)
    assert result.losses.keys() == reference.losses.keys()
    for name, loss in result.losses.items():
        assert loss.item() == pytest.approx(reference.losses[name].item(), rel=1e-12)


@contextmanager
def counted_runs(*modules: nn.Module) -> Any:
    """How often each module ran inside, as a list to look at."""
    runs = [0] * len(modules)

    def counter(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            runs[place] += 1

        return hook

    with ExitStack() as hooks:
        for place, module in enumerate(modules):
            hooks.callback(module.register_forward_hook(counter(place)).remove)
        yield runs


all_schedules = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
one_and_three = pytest.mark.parametrize("micro_batches", [1, 3])


def recomputing(*parts: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("recompute", parts, ids=lambda names: "+".join(names) or "kept")


# --- timm: a list of scales -------------------------------------------------------------------------------


class OnScales(nn.Module):
    """Adds up some of the scales at the size of the finest of them; (batch, out, h, w)."""

    def __init__(self, scales: Mapping[int, int], out: int) -> None:
        super().__init__()
        self.scales = list(scales)
        self.lateral = nn.ModuleList(nn.Conv2d(channels, out, 1) for channels in scales.values())

    def forward(self, features: list[Tensor]) -> Tensor:
        size = features[self.scales[0]].shape[-2:]
        maps = [lateral(features[scale]) for lateral, scale in zip(self.lateral, self.scales, strict=True)]
        return torch.stack([F.interpolate(m, size=size, mode="bilinear") for m in maps]).sum(0)


class OnLast(nn.Module):
    """A class from the last scale; (batch, classes)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Linear(channels, CLASSES)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.layer(features[-1].mean((2, 3)))


def resnet18_scales() -> MultiTaskModel:
    """Scales of 64, 64, 128 and 256 channels; no head uses the first."""
    trunk = timm.create_model("resnet18", pretrained=False, features_only=True, out_indices=(0, 1, 2, 3))
    return MultiTaskModel(
        trunk,
        {
            "seg": Segmentation(CLASSES, head=OnScales({1: 64, 3: 256}, CLASSES), weight=0.7),
            "depth": Regression(dense=True, head=OnScales({1: 64, 2: 128}, 1)),
            "cls": Classification(CLASSES, head=OnLast(256), weight=1.5),
        },
        inputs="image",
    )


def resnet18_forward(model: MultiTaskModel, batch: Batch) -> Sums:
    features = model.trunk(batch["image"])
    sums = {
        "seg": class_sums(model.task("seg").head(features), batch["seg"], 255),
        "depth": l1_sums(model.task("depth").head(features), batch["depth"]),
        "cls": class_sums(model.task("cls").head(features), batch["cls"], -100),
    }
    return {name: pair for name, pair in sums.items() if pair[1]}


RESNET18 = Case(resnet18_scales, 4, {"seg": 0.7, "depth": 1.0, "cls": 1.5}, resnet18_forward)


@all_schedules
@one_and_three
@recomputing((), ("trunk.conv1", "trunk.layer2", "trunk.layer3[0:1]"), ("trunk", "seg"))
def test_timm_scales_train_as_the_joint_loss_b5(
    schedule: str, micro_batches: int, recompute: Sequence[str]
) -> None:
    check(RESNET18, schedule, micro_batches, recompute)


def test_the_windows_have_a_task_without_labels_in_a_micro_batch_l1() -> None:
    # what the tests of this file lean on: with three micro-batches the last two have no class
    window = RESNET18.window(3)
    model = RESNET18.model()

    with counted_runs(model.task("cls").head, model.task("seg").head) as runs:
        result = Engine(model).accumulate(window)

    assert [len(batch["image"]) for batch in window] == [3, 2, 2]
    assert [int((batch["cls"] != -100).sum()) for batch in window] == [3, 1, 0]
    assert runs == [2, 3]
    assert result.counts["cls"] == 4


@pytest.mark.parametrize(
    ("schedule", "passes", "again"), [("summed", 3, 3), ("split", 3, 3), ("sequential", 8, 5)]
)
def test_recomputed_layers_run_once_more_and_others_do_not_s1(schedule: str, passes: int, again: int) -> None:
    # sequential: three tasks in two micro-batches, two in the third, where no class is known. Depth, which is
    # in all three, doesn't look at layer3, so no gradient asks for its graph there.
    model = RESNET18.model()
    layer2, layer3 = model.trunk["layer2"], model.trunk["layer3"]
    recompute = ["trunk.layer2", "trunk.layer3[0:1]"]

    with counted_runs(layer2[1].conv2, layer3[0].conv1, layer3[1].conv1) as runs:
        Engine(model, schedule=schedule, recompute=recompute).accumulate(RESNET18.window(3))

    assert runs == [2 * passes, passes + again, passes]
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert_equal_states(dict(model.named_buffers()), expected(RESNET18, 3).buffers)


def test_the_one_call_on_the_users_own_loop_trains_as_the_joint_loss() -> None:
    model, batch = RESNET18.model(), RESNET18.window(1)[0]
    net, heads = model.trunk, {name: task.head for name, task in model.tasks_by_name().items()}

    def mean(sums: tuple[Tensor, int]) -> Tensor:
        return sums[0] / sums[1]

    split_backward(
        lambda: net(batch["image"]),
        {
            "seg": lambda f: mean(class_sums(heads["seg"](f), batch["seg"], 255)),
            "depth": lambda f: mean(l1_sums(heads["depth"](f), batch["depth"])),
            "cls": lambda f: mean(class_sums(heads["cls"](f), batch["cls"], -100)),
        },
        weights={"seg": 0.7, "cls": 1.5},
        recompute=True,
    )

    assert_close_gradients(model, expected(RESNET18, 1), 1e-12)
    assert_equal_states(dict(model.named_buffers()), expected(RESNET18, 1).buffers)


def test_an_idle_head_stays_as_it_is_under_momentum_and_decay_i1() -> None:
    model = RESNET18.model()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    engine.step(RESNET18.window(1))  # momentum for all
    head, trunk = (copy.deepcopy(m.state_dict()) for m in (model.task("cls").head, model.trunk))
    unlabelled = {key: value for key, value in batch_of(4, 4, seed=2).items() if key != "cls"}

    result = engine.step(split_batch(unlabelled, 2))

    assert result.stepped
    assert "cls" not in result.losses
    assert_equal_states(model.task("cls").head.state_dict(), head)
    assert not torch.equal(model.trunk.state_dict()["conv1.weight"], trunk["conv1.weight"])


# --- a frozen backbone ------------------------------------------------------------------------------------


@all_schedules
@recomputing((), ("trunk.layer2", "depth"), ("trunk",))
def test_a_frozen_backbone_runs_once_without_a_graph_b4(schedule: str, recompute: Sequence[str]) -> None:
    model, window = RESNET18.model(), RESNET18.window(3)
    model.trunk.requires_grad_(False).eval()
    before = copy.deepcopy(model.trunk.state_dict())
    reference = joint(RESNET18, model, window)
    graphs: list[bool] = []
    model.trunk.register_forward_hook(lambda *call: graphs.extend(f.requires_grad for f in call[2]))

    with counted_runs(model.trunk["layer2"][0].conv1) as runs:
        Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert all(parameter.grad is None for parameter in model.trunk.parameters())
    assert_equal_states(model.trunk.state_dict(), before)
    assert not any(graphs)
    assert runs == [8 if schedule == "sequential" else 3]


@all_schedules
def test_a_frozen_backbone_in_training_mode_is_told_of_and_keeps_its_statistics(schedule: str) -> None:
    model, window = RESNET18.model(), RESNET18.window(3)
    model.trunk.requires_grad_(False)
    before = copy.deepcopy(model.trunk.state_dict())
    reference = joint(RESNET18, model, window)

    with pytest.warns(UserWarning, match="trunk is frozen"):
        Engine(model, schedule=schedule).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(model.trunk.state_dict(), before)


@all_schedules
@recomputing((), ("trunk.conv1", "trunk.layer1", "trunk.layer3"))
def test_a_backbone_of_which_the_first_layers_are_frozen(schedule: str, recompute: Sequence[str]) -> None:
    model, window = RESNET18.model(), RESNET18.window(3)
    for name in ("conv1", "bn1", "layer1", "layer2"):
        model.trunk[name].requires_grad_(False)
    reference = joint(RESNET18, model, window)

    Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), reference.buffers)


# --- timm: tokens -----------------------------------------------------------------------------------------


class OnClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(tokens[:, 0])


class OnPatchTokens(nn.Module):
    """Logits for each patch; (batch, tokens, 192) to (batch, classes, h, w)."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.layer = nn.Conv2d(192, CLASSES, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        patches = tokens[:, 1:].transpose(1, 2)
        return self.layer(self.dropout(patches.unflatten(2, (SIZE // 16, SIZE // 16))))


def vit_tiny() -> MultiTaskModel:
    trunk = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=SIZE,
        depth=3,
        num_classes=0,
        global_pool="",
        drop_rate=0.1,
        attn_drop_rate=0.1,
        drop_path_rate=0.3,
    )
    return MultiTaskModel(
        trunk,
        {
            "cls": Classification(CLASSES, head=OnClassToken()),
            "seg": Segmentation(CLASSES, head=OnPatchTokens(), weight=0.3),
        },
        inputs="image",
    )


def vit_forward(model: MultiTaskModel, batch: Batch) -> Sums:
    tokens, sums = model.trunk(batch["image"]), {}
    if (batch["cls"] != -100).any():
        sums["cls"] = class_sums(model.task("cls").head(tokens), batch["cls"], -100)
    return {**sums, "seg": class_sums(model.task("seg").head(tokens), batch["seg"], 255)}


VIT = Case(vit_tiny, 16, {"cls": 1.0, "seg": 0.3}, vit_forward)


@all_schedules
@one_and_three
@recomputing(
    (),
    ("trunk.blocks.*",),
    ("trunk.blocks[0:2]",),
    ("trunk.patch_embed", "trunk.blocks.?.attn", "seg"),
    ("trunk",),
)
def test_vit_tokens_with_dropout_and_dropped_paths_train_as_the_joint_loss_s3(
    schedule: str, micro_batches: int, recompute: Sequence[str]
) -> None:
    check(VIT, schedule, micro_batches, recompute)


@all_schedules
@recomputing((), ("trunk.blocks.*",))
def test_vit_with_timms_own_checkpointing_trains_as_the_joint_loss_s3(
    schedule: str, recompute: Sequence[str]
) -> None:
    model = VIT.model()
    model.trunk.set_grad_checkpointing()
    seed_everything(5)

    with counted_runs(model.trunk.blocks[0].mlp.fc1) as runs:
        Engine(model, schedule=schedule, recompute=recompute).accumulate(VIT.window(3))

    assert_close_gradients(model, expected(VIT, 3), 1e-12)
    assert runs[0] >= 6  # it did checkpoint


def test_a_run_that_timm_does_not_call_is_told_of() -> None:
    model = VIT.model()
    model.trunk.set_grad_checkpointing()  # timm then calls block after block, and not their Sequential

    with pytest.warns(UserWarning, match=r"trunk\.blocks\[0:2\] did not run"):
        Engine(model, recompute=["trunk.blocks[0:2]"]).accumulate(VIT.window(1))


# --- torchvision: a dict of features, DeepLab's head and FCN's ----------------------------------------------


class Picked(Segmentation):
    """Segmentation from one entry of a dict of features, at the size of the labels."""

    def __init__(self, entry: str, head: nn.Module, **settings: Any) -> None:
        super().__init__(CLASSES, head=head, target="seg", size_like="seg", **settings)
        self.entry = entry

    def forward(self, features: Mapping[str, Tensor], batch: Any) -> Tensor:
        return super().forward(features[self.entry], batch)


def on_torchvision(trunk: nn.Module) -> MultiTaskModel:
    return MultiTaskModel(
        trunk,
        {
            "seg": Picked("out", deeplabv3.DeepLabHead(256, CLASSES)),
            "aux": Picked("aux", fcn.FCNHead(64, CLASSES), weight=0.4),
        },
        inputs="image",
    )


def deeplab() -> MultiTaskModel:
    backbone = resnet.ResNet(resnet.BasicBlock, [1, 1, 2, 1])
    return on_torchvision(getter.IntermediateLayerGetter(backbone, {"layer1": "aux", "layer3": "out"}))


def deeplab_forward(model: MultiTaskModel, batch: Batch) -> Sums:
    features = model.trunk(batch["image"])
    sums = {}
    for name, entry in (("seg", "out"), ("aux", "aux")):
        logits = model.task(name).head(features[entry])
        logits = F.interpolate(logits, batch["seg"].shape[-2:], mode="bilinear", align_corners=False)
        sums[name] = class_sums(logits, batch["seg"], 255)
    return sums


DEEPLAB = Case(deeplab, 4, {"seg": 1.0, "aux": 0.4}, deeplab_forward)


@all_schedules
@one_and_three
@recomputing(
    (),
    ("trunk.layer2", "trunk.layer3[0:1]", "seg.0.convs.*", "aux[0:3]"),
    ("trunk", "seg", "aux"),
)
def test_deeplab_and_fcn_on_a_dict_of_features_train_as_the_joint_loss(
    schedule: str, micro_batches: int, recompute: Sequence[str]
) -> None:
    check(DEEPLAB, schedule, micro_batches, recompute)


@all_schedules
def test_one_sample_is_too_few_for_deeplabs_batchnorm_which_is_said_by_name(schedule: str) -> None:
    model, window = DEEPLAB.model(), split_batch(batch_of(3, 4), 3)

    with pytest.raises(TaskError, match=r"'seg' \(head DeepLabHead .*more than 1 value per channel"):
        Engine(model, schedule=schedule).accumulate(window)
    assert all(parameter.grad is None for parameter in model.parameters())

    Engine(model, schedule=schedule, batchnorm="freeze").accumulate(window)
    assert all(parameter.grad is not None for parameter in model.parameters())


@all_schedules
def test_frozen_batchnorm_makes_the_number_of_micro_batches_no_difference_n3(schedule: str) -> None:
    # normalised by running statistics, no dropout: whole batch and parts are the same mean
    whole = DEEPLAB.model().eval()
    reference = joint(DEEPLAB, whole, DEEPLAB.window(1, samples=3))
    for micro_batches in (1, 3):
        model = DEEPLAB.model()
        for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
            dropout.p = 0.0
        engine = Engine(model, schedule=schedule, batchnorm="freeze", recompute=["trunk.layer*"])
        engine.accumulate(DEEPLAB.window(micro_batches, samples=3))
        assert_close_gradients(model, reference, 1e-12)


@all_schedules
@recomputing((), ("trunk.layer1.0.conv1", "seg.0"))
def test_a_traced_feature_extractor_trains_as_the_joint_loss(schedule: str, recompute: Sequence[str]) -> None:
    torch.manual_seed(0)
    backbone = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
    trunk = extraction.create_feature_extractor(backbone, {"layer1": "aux", "layer3": "out"})
    model, window = on_torchvision(trunk).double(), DEEPLAB.window(2, samples=4)
    seed_everything(5)
    reference = joint(DEEPLAB, model, window)

    seed_everything(5)
    Engine(model, schedule=schedule, recompute=recompute).accumulate(window)

    assert_close_gradients(model, reference, 1e-12)
    assert_equal_states(dict(model.named_buffers()), reference.buffers)


# --- what training leaves of the user's modules -------------------------------------------------------------


@pytest.mark.parametrize("case", [RESNET18, VIT, DEEPLAB], ids=["resnet18", "vit", "deeplab"])
def test_training_leaves_nothing_on_the_users_modules_but_their_state(case: Case) -> None:
    model, window = case.model(), case.window(2, samples=4)
    modules, names = model.own_modules(), [name for name, _ in model.named_modules()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    Engine(model, optimizer, recompute=["trunk", "seg"]).step(window)

    untrained = case.model()
    untouched = copy.deepcopy(untrained).eval()
    untouched.load_state_dict(model.eval().state_dict())
    with torch.no_grad():
        predictions, same = model(window[0]), untouched(window[0])
        before = untrained.eval()(window[0])

    assert model.own_modules() == modules
    assert [name for name, _ in model.named_modules()] == names
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    for name, prediction in predictions.items():
        assert torch.equal(prediction, same[name])
        assert not torch.equal(prediction, before[name])


def test_four_heads_peak_like_one_where_the_joint_loss_holds_them_all_g3() -> None:
    torch.manual_seed(0)
    backbone = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
    trunk = getter.IntermediateLayerGetter(backbone, {"layer1": "fine"})
    heads = nn.ModuleList(deeplabv3.DeepLabHead(64, CLASSES) for _ in range(4))
    image, labels = torch.rand(4, 3, 48, 48), torch.randint(0, CLASSES, (4, 12, 12))

    def losses(number: int) -> dict[str, Callable[[Any], Tensor]]:
        return {
            str(n): lambda features, head=head: F.cross_entropy(head(features["fine"]), labels)
            for n, head in enumerate(heads[:number])
        }

    def all_at_once() -> None:
        features = trunk(image)
        torch.stack([loss(features) for loss in losses(4).values()]).sum().backward()

    def peak(step: Callable[[], object]) -> int:
        return measure_peak(step, existing=[trunk, heads]).activation_bytes

    all_at_once()  # the gradients exist before anything is measured
    joint_peak = peak(all_at_once)
    one, four = (peak(lambda n=n: split_backward(trunk(image), losses(n))) for n in (1, 4))
    recomputed = peak(lambda: split_backward(lambda: trunk(image), losses(4), recompute=True))
    assert four <= 1.05 * one
    assert joint_peak >= 2 * four
    assert recomputed <= 0.9 * four
