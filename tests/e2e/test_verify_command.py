"""``python -m mtaccum.verify``: passes on what ships, and names what was planted, in words a user can use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtaccum.config import group_options, run_command
from mtaccum.verify import verify

SMALL = ["data.train.size=64", "data.val.size=8", "batch_size=16", "verify.samples=8"]

PLANTED = '''
"""Tasks and trunks with one fault each."""
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mtaccum import Task, register_task

state = np.random.default_rng(0)


class Plain(Task):
    """The mean class of each picture, from pooled features; sound."""

    def __init__(self, in_channels, target="seg", weight=1.0, on="trunk"):
        super().__init__(nn.Conv2d(in_channels, 1, 1), target=target, weight=weight, on=on)

    def pooled(self, prediction):
        return prediction.mean((1, 2, 3))

    def wanted(self, batch):
        return (batch["seg"] > 0).float().mean((1, 2)).to(self.head.weight.dtype)

    def loss(self, prediction, batch):
        return F.mse_loss(self.pooled(prediction), self.wanted(batch))


register_task("plain")(Plain)


@register_task("wrong_count")
class WrongCount(Plain):
    def loss(self, prediction, batch):  # a mean over the pictures of large digits alone
        chosen = (batch["cls"] >= 5).to(self.head.weight.dtype)
        return ((self.pooled(prediction) - self.wanted(batch)).square() * chosen).sum() / chosen.sum()


@register_task("in_place")
class InPlace(Plain):
    def forward(self, features, batch):
        return self.head(F.relu_(features))


@register_task("unreached")
class Unreached(Plain):
    def __init__(self, in_channels, **rest):
        super().__init__(in_channels, **rest)
        self.head.lost = nn.Linear(3, 3)


@register_task("non_additive")
class NonAdditive(Plain):
    def loss(self, prediction, batch):
        p, y = self.pooled(prediction).sigmoid(), self.wanted(batch)
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


@register_task("declared")
class Declared(NonAdditive):
    additive = False


@register_task("own_generator")
class OwnGenerator(Plain):
    def forward(self, features, batch):
        return self.head(features) * torch.from_numpy(state.random(1)).to(features)


@register_task("couples")
class Couples(Plain):
    def forward(self, features, batch):
        return self.head(features - features.mean(0))


class Keeps(nn.Conv2d):
    def forward(self, x):
        prediction = super().forward(x)
        self.kept = prediction.square()
        return prediction


@register_task("keeps")
class KeepsGraph(Plain):
    def __init__(self, in_channels, **rest):
        super().__init__(in_channels, **rest)
        self.head = Keeps(in_channels, 1, 1)


class Remembers(nn.Conv2d):
    def __init__(self):
        super().__init__(1, 8, 3, padding=1)

    def forward(self, x):
        Remembers.last = super().forward(x)
        return Remembers.last


@register_task("reads_past")
class ReadsPast(Plain):
    def forward(self, features, batch):
        return self.head(Remembers.last)


class Counts(nn.Conv2d):
    """State that is no buffer."""

    calls = 0

    def __init__(self):
        super().__init__(1, 8, 3, padding=1)

    def forward(self, x):
        Counts.calls += 1
        return super().forward(x) * Counts.calls
'''


def run(*arguments: str, capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, str]:
    capsys.readouterr()
    code = run_command("train", verify, [*arguments, f"hydra.run.dir={folder / 'run'}", *SMALL])
    shown = capsys.readouterr()
    assert shown.err == "" or code == 2, shown.err
    return code, shown.out + shown.err


SHIPPED = [
    *(["tasks=[seg,cls]", f"engine={name}"] for name in group_options("engine")),
    *([f"tasks=[{name}]"] for name in group_options("tasks")),
    *(["tasks=[seg,cls]", f"trunk={name}"] for name in group_options("trunk")),
    *(["tasks=[seg,cls]", f"optimizer={name}"] for name in group_options("optimizer")),
    *(["tasks=[seg,cls]", f"lr_schedule={name}"] for name in group_options("lr_schedule")),
    ["tasks=[seg,cls]", "+experiment=quick"],
    ["+experiment=all_tasks"],
    ["+experiment=all_tasks", "engine=sequential", "engine.recompute=[trunk]"],
    ["+experiment=all_tasks", "engine.recompute=['trunk.levels.*',seg]", "engine=sequential"],
    ["+experiment=all_tasks", "accumulate=4", "engine.batchnorm=freeze"],
    ["+experiment=all_tasks", "engine.head_groups=[[cls,number]]", "engine=sequential"],
    ["+experiment=all_tasks", "engine.chunks={seg: 3}", "engine.batchnorm=freeze", "engine.offload=true"],
    ["tasks=[seg,cls]", "engine.precision=bf16", "engine.compile=true", "engine.max_grad_norm=1"],
]


@pytest.mark.parametrize("arguments", SHIPPED, ids=" ".join)
def test_it_passes_on_what_ships(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, shown = run(*arguments, capsys=capsys, folder=tmp_path)
    assert code == 0, shown
    assert "exact: the contract holds" in shown
    assert "1e-12" in shown
    assert "8 of the 16 samples" in shown
    assert ("note (offload) offload" in shown) == ("engine.offload=true" in arguments)
    assert ("bf16 rounds" in shown) == ("engine.precision=bf16" in arguments)
    assert list(tmp_path.iterdir()) == [], "it wrote something"


FAULTS = [
    ([], ["wrong_count"], "fault (count) wrong_count"),
    ([], ["in_place"], "fault (in-place) split: 'in_place' writes in place"),
    (
        ["engine.head_groups=[[in_place,plain]]"],
        ["in_place", "plain"],
        "fault (in-place) split: 'in_place+plain' writes in place",
    ),
    ([], ["unreached"], "fault (unreached parameters) tasks.unreached.head.lost.weight"),
    (["tasks=[cls]", "accumulate=4"], [], "fault (coupled samples) trunk.stem.1"),
    (["engine=sequential"], ["own_generator"], "fault (randomness) own_generator"),
    ([], ["non_additive"], "fault (count) non_additive"),
    (["accumulate=2", "engine.batchnorm=freeze"], ["declared"], "fault (non-additive loss) declared"),
    (["accumulate=2", "engine.batchnorm=freeze"], ["couples"], "fault (coupled samples) couples"),
    (
        ["engine.chunks={couples: 2}", "engine.batchnorm=freeze"],
        ["couples"],
        "fault (coupled samples) couples",
    ),
    ([], ["keeps", "plain"], "fault (graphs alive) plain"),
    (["~trunk", "+trunk={_target_: planted.Remembers}"], ["reads_past", "plain"], "freed already"),
    (
        ["~trunk", "+trunk={_target_: planted.Counts}", "engine=sequential"],
        ["plain"],
        "fault (randomness) trunk",
    ),
]


@pytest.mark.parametrize(("options", "tasks", "shown"), FAULTS, ids=[" ".join(o + t) for o, t, _ in FAULTS])
def test_it_names_each_planted_fault(
    options: list[str],
    tasks: list[str],
    shown: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)  # so that it registers its tasks anew
    arguments = [*options, "plugins=[planted]", *(f"+tasks.{name}={{type: {name}}}" for name in tasks)]
    code, printed = run(*arguments, capsys=capsys, folder=tmp_path)
    assert code == 1, printed
    assert shown in printed
    assert "not exact: see the faults above" in printed


def test_the_command_as_it_is_typed(tmp_path: Path) -> None:
    def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mtaccum.verify", *arguments, *SMALL],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    done = typed("+tasks=[seg,cls]")
    assert done.returncode == 0, done.stderr
    assert "exact: the contract holds" in done.stdout
    assert typed("+tasks=[seg,cls]", "accumulate=4").returncode == 1
    wrong = typed("+tasks=[seg,cls]", "verify.sample=8")
    assert wrong.returncode == 2
    assert "verify.samples" in wrong.stderr or "Did you mean 'samples'" in wrong.stderr
    unknown = typed("+tasks=[seg,cls]", "engine.recompute=[trunk.layer1]")
    assert unknown.returncode == 2
    assert "trunk.levels" in unknown.stderr
    assert list(tmp_path.iterdir()) == [], "it left something behind"
