"""Every error that a user of the command can make: a few lines that name the way out, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtaccum.config import run_command
from mtaccum.train import train

# what the user types, and what the message must name
CASES = {
    "no task": ([], ["no task was chosen", "cls, depth, number, seg", "'+tasks=[seg,cls]'"]),
    "empty tasks": (["tasks=[]"], ["no task was chosen", "'+tasks=[seg,cls]'"]),
    "unknown task": (["+tasks=[segg,cls]"], ["'segg'", "Did you mean 'seg'?", "depth"]),
    "unknown task without plus": (["tasks=[cls,detph]"], ["'detph'", "Did you mean 'depth'?"]),
    "two tasks of one name": (["+tasks=[seg,seg]"], ["'seg' is named twice"]),
    "unknown option": (["+tasks=[seg]", "engine=splitt"], ["engine", "'splitt'", "'split'", "summed"]),
    "unknown trunk": (["+tasks=[seg]", "trunk=resnet"], ["trunk", "'resnet'", "conv"]),
    "unknown key": (["+tasks=[seg]", "trainer.max_step=5"], ["'max_step'", "Did you mean 'max_steps'?"]),
    "unknown key at the top": (["+tasks=[seg]", "batchsize=5"], ["'batchsize'", "'batch_size'"]),
    "unknown key of a task": (["+tasks=[seg]", "tasks.seg.wight=2"], ["tasks.seg", "'wight'", "'weight'"]),
    "added key": (["+tasks=[seg]", "+trainer.max_stepps=5"], ["'max_stepps'", "'max_steps'"]),
    "added key of a task": (["+tasks=[seg]", "+tasks.seg.wight=2"], ["tasks.seg", "'wight'", "'weight'"]),
    "mistyped value": (
        ["+tasks=[seg]", "trainer.max_steps=many"],
        ["trainer.max_steps", "integer", "'many'"],
    ),
    "several at once": (
        ["+tasks=[seg]", "batch_size=0", "trainer.log_every=-1"],
        ["batch_size", "trainer.log_every", "0", "-1"],
    ),
    "several in the engine at once": (
        ["+tasks=[seg]", "engine.max_grad_norm=-1", "engine.precision=fp8", "engine.chunks={seg: 0}"],
        [
            *("engine.max_grad_norm must be a finite number above 0, got -1", "engine.precision 'fp8'"),
            *("Known: bf16, fp16, fp32", "engine.chunks.seg must be a whole number of at least 1, got 0"),
        ],
    ),
    "options of the engine that exclude each other": (
        ["+tasks=[seg]", "engine=sequential", "engine.chunks={seg: 2}"],
        ["chunks belongs to schedule='split'", "'sequential'"],
    ),
    "unknown key of the engine": (
        ["+tasks=[seg]", "engine.groups=[[seg,cls]]"],
        ["'groups'", "Did you mean 'head_groups'?"],
    ),
    "an option of the ranks given to the engine": (
        ["+tasks=[seg]", "+engine.comm_hook=fp16"],
        ["key in engine:", "'comm_hook'"],
    ),
    "pictures below 0": (["+tasks=[seg]", "trainer.pictures=-1"], ["trainer.pictures", "equal to 0", "-1"]),
    "K below 1": (["+tasks=[seg]", "accumulate=0"], ["accumulate", "greater than or equal to 1", "0"]),
    "batch size below 1": (["+tasks=[seg]", "batch_size=-3"], ["batch_size", "-3"]),
    "steps below 1": (["+tasks=[seg]", "trainer.max_steps=0"], ["trainer.max_steps", "0"]),
    "K and micro-batch size": (
        ["+tasks=[seg]", "accumulate=2", "micro_batch_size=8"],
        ["accumulate or micro_batch_size, not both"],
    ),
    "more micro-batches than a batch": (
        ["+tasks=[seg]", "batch_size=4", "accumulate=5"],
        ["accumulate=5", "4 samples"],
    ),
    "more micro-batches than samples": (
        ["+tasks=[seg]", "accumulate=40", "data.train.size=32"],
        ["accumulate=40", "32"],
    ),
    "plugin": (
        ["+tasks=[seg]", "plugins=[no_such_module]"],
        ["no_such_module", "can't be imported", "PYTHONPATH"],
    ),
    "target nowhere": (
        ["+tasks=[seg]", "tasks.seg.target=mask"],
        ["tasks.seg", "'mask'", "first 1000 samples", "image, seg, cls"],
    ),
    "task type": (["+tasks.edges={type: edgy}"], ["'edgy'", "segmentation", "register_task"]),
    "no task type": (["+tasks.edges={weight: 1}"], ["tasks.edges", "type", "segmentation"]),
    "negative weight": (["+tasks=[seg]", "tasks.seg.weight=-1"], ["tasks.seg", "weight", "-1"]),
    "infinite weight": (["+tasks=[seg]", "tasks.seg.weight=inf"], ["tasks.seg", "weight", "inf"]),
    "NaN weight": (["+tasks=[seg]", "tasks.seg.weight=nan"], ["tasks.seg", "weight", "nan"]),
    "mode": (["+tasks=[seg]", "tasks.seg.mode=freeze"], ["tasks.seg", "'freeze'", "'frozen'", "detached"]),
    "all off": (["+tasks=[seg]", "tasks.seg.mode=off"], ["every task is switched off"]),
    "node": (["+tasks=[seg]", "tasks.seg.on=fpn"], ["'fpn'", "trunk"]),
    "head and features": (
        ["+tasks=[seg]", "tasks.seg.in_channels=7"],
        ["'seg'", "DenseHead", "'trunk'", "Tensor(2,", "7"],
    ),
    "monitor": (["+tasks=[seg]", "trainer.monitor=seg/iou"], ["'seg/iou'", "'seg/miou'"]),
    "group": (["+tasks=[seg]", "+optimizer.groups.trnk.lr=1e-4"], ["'trnk'", "'trunk'", "seg"]),
    "optimizer argument": (
        ["+tasks=[seg]", "optimizer=sgd", "optimizer.momentun=0.9"],
        ["key in optimizer:", "'momentun'", "'momentum'"],
    ),
    "data argument": (["+tasks=[seg]", "data.val.sise=5"], ["key in data.val:", "'sise'", "'size'"]),
    "own class with shipped arguments": (
        ["+tasks=[seg]", "trunk._target_=torch.nn.Identity2d"],
        ["trunk", "Identity2d"],
    ),
    "own trunk with shipped arguments": (
        ["+tasks=[seg]", "trunk._target_=torch.nn.Flatten"],
        ["key in trunk:", "'in_channels'", "'~trunk' '+trunk={_target_: torch.nn.Flatten}'"],
    ),
    "settings of a task that is not chosen": (
        ["+tasks=[seg]", "tasks.number.weight=2"],
        ["tasks.number needs a type", "'+tasks=[...,number]'"],
    ),
    "group setting": (["+tasks=[seg]", "optimizer.groups={trunk: {learnrate: 1}}"], ["'learnrate'", "lr"]),
    "group rate": (["+tasks=[seg]", "optimizer.groups={trunk: {lr: abc}}"], ["trunk.lr", "'abc'"]),
    "config dir": (["--config-dir", "nowhere", "+tasks=[seg]"], ["--config-dir", "'nowhere'"]),
    "seed": (["+tasks=[seg]", "seed=20000000000000"], ["seed", "2147483648"]),
    "label": (["+tasks=[cls]", "tasks.cls.num_classes=2"], ["task 'cls': label", "valid are 0 to 1"]),
    "scale without base": (["+tasks=[seg]", "lr_schedule.scale=linear"], ["base_batch_size"]),
    "device": (["+tasks=[seg]", "device=gpu0"], ["device", "'gpu0'", "cuda"]),
    "resume": (["+tasks=[seg]", "resume=nowhere"], ["no checkpoint at 'nowhere'"]),
    "target class": (["+tasks=[seg]", "trunk._target_=mtaccum.model.ConvTrunkk"], ["trunk", "ConvTrunkk"]),
    "max_steps and epochs": (["+tasks=[seg]", "trainer.epochs=2"], ["either max_steps or epochs"]),
    "patience without evaluation": (
        ["+tasks=[seg]", "trainer.patience=2", "trainer.eval_every=0"],
        ["patience", "eval_every"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_error_is_explained_and_leaves_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, named = CASES[case]
    monkeypatch.chdir(tmp_path)

    code = run_command("train", train, arguments)

    output, error = capfd.readouterr()
    assert code == 2
    assert "Traceback" not in error + output
    assert len(error.splitlines()) <= 7, error
    for word in named:
        assert word in error, f"{word!r} is not in: {error}"
    assert list(tmp_path.iterdir()) == []


def test_error_of_a_label_names_task_value_and_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Labels are checked when they come, so this one is found in training, before any forward."""
    monkeypatch.chdir(tmp_path)
    arguments = ["+tasks=[seg]", "tasks.seg.num_classes=5", "data.train.size=64"]

    assert run_command("train", train, arguments) == 2

    error = capfd.readouterr().err
    assert "task 'seg': label" in error
    assert "valid are 0 to 4, or 255" in error


def test_a_folder_with_a_run_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt").write_bytes(b"precious")

    assert run_command("train", train, ["+tasks=[seg]", "hydra.run.dir=run"]) == 2

    assert "holds a run already" in capfd.readouterr().err
    assert (tmp_path / "run" / "last.pt").read_bytes() == b"precious"


def test_hydra_full_error_gives_the_stack_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtaccum import ConfigError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError, match="plugin"):
        run_command("train", train, ["+tasks=[seg]", "plugins=[no_such_module]"])
