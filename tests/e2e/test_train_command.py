"""The command as a user types it: what a run leaves, resuming, interrupting, killing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import LIMIT_S, Forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import mtaccum
from mtaccum.data import DigitScenes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = [
    "batch_size=8",
    "data.train.size=44",
    "data.val.size=16",
    "trainer.log_every=2",
    "trainer.eval_every=4",
    "trainer.checkpoint_every=3",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mtaccum.train", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run of three tasks in three micro-batches, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    done = run(
        folder,
        "tasks=[seg,cls,depth]",
        "accumulate=3",
        "trainer.max_steps=8",
        "tasks.cls.weight=2",
        *SMALL,
        "hydra.run.dir=here",
    )
    assert done.returncode == 0, done.stderr
    return folder / "here", done.stdout


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_summary_holds_the_run(finished: tuple[Path, str]) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())

    # 44 samples in batches of 8: five whole ones in 3 micro-batches each, and one of 4 samples in 2
    assert summary["steps"] == 8
    assert summary["micro_batches"] == 5 * 3 + 2 + 2 * 3
    assert summary["samples"] == 44 + 2 * 8
    assert (summary["schedule"], summary["batch_size"], summary["accumulate"]) == ("split", 8, 3)
    assert summary["peak_bytes"] > 1_000_000
    assert summary["peak_method"] == "live tensor bytes"
    assert summary["elapsed_s"] > 0
    assert set(summary["tasks"]["seg"]) == {"loss", "miou", "pixel_accuracy"}
    assert set(summary["tasks"]["cls"]) == {"loss", "accuracy"}
    assert set(summary["tasks"]["depth"]) == {"loss", "mae"}


def test_metrics_jsonl_has_one_object_per_logged_step(finished: tuple[Path, str]) -> None:
    lines = lines_of(finished[0] / "metrics.jsonl")

    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    for line in lines:
        assert set(line) == {
            "step",
            *(f"loss/{task}" for task in ("seg", "cls", "depth")),
            *(f"count/{task}" for task in ("seg", "cls", "depth")),
            "lr",
            "grad_norm",
            "samples_per_s",
        }
    samples = [4 if line["step"] == 6 else 8 for line in lines]  # the sixth batch is the short one
    assert [line["count/cls"] for line in lines] == samples
    assert [line["count/seg"] for line in lines] == [n * 32 * 32 for n in samples]
    validation = lines_of(finished[0] / "validation.jsonl")
    assert [line["step"] for line in validation] == [4, 8]
    last = validation[-1]
    total = last["val/seg/loss"] + 2 * last["val/cls/loss"] + last["val/depth/loss"]
    assert last["val/loss"] == pytest.approx(total)


def test_tensorboard_events_can_be_read_back(finished: tuple[Path, str]) -> None:
    events = EventAccumulator(str(finished[0])).Reload()

    tags = set(events.Tags()["scalars"])
    assert {"loss/seg", "count/cls", "lr", "grad_norm", "samples_per_s", "peak_bytes"} <= tags
    assert {"val/loss", "val/seg/miou", "val/cls/accuracy", "val/depth/mae"} <= tags
    # that of the memory is there where matplotlib is
    assert set(events.Tags()["images"]) - {"memory/step"} == {"val/seg", "val/depth"}
    assert [(e.step, e.height) for e in events.Images("val/seg")] == [(4, 4 * 128 + 12), (8, 4 * 128 + 12)]
    jsonl = {line["step"]: line["loss/seg"] for line in lines_of(finished[0] / "metrics.jsonl")}
    assert {e.step: e.value for e in events.Scalars("loss/seg")} == pytest.approx(jsonl)


def test_pipe_gets_plain_lines_and_a_table(finished: tuple[Path, str]) -> None:
    printed = finished[1]

    assert "step 2/8" in printed
    assert "\x1b[" not in printed  # no colours or cursor movements
    for word in ("miou", "accuracy", "split", "live tensor bytes", "here"):
        assert word in printed


def test_config_is_resolved(finished: tuple[Path, str]) -> None:
    text = (finished[0] / "config.yaml").read_text()

    assert "${" not in text
    assert "in_channels: null" not in text
    assert "weight: 2" in text


def test_loaded_model_predicts_and_evaluates_as_at_the_end(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    model = mtaccum.load(folder, state="last")
    scenes = DigitScenes("val", size=16)
    batch = torch.utils.data.default_collate([scenes[i] for i in range(16)])

    predictions = model({"image": batch["image"]})
    metrics = mtaccum.evaluate(model, [batch])

    assert not model.training
    assert predictions["seg"].shape == (16, 11, 32, 32)
    assert predictions["cls"].shape == (16, 10)
    assert predictions["depth"].shape == (16, 1, 32, 32)
    summary = json.loads((folder / "summary.json").read_text())["tasks"]
    for task, values in summary.items():
        assert metrics[task] == pytest.approx(values, rel=1e-5)


def test_resume_goes_on_in_the_same_folder_as_if_uninterrupted(tmp_path: Path, forked: Forked) -> None:
    arguments = ["+tasks=[seg,cls]", *SMALL, "accumulate=2"]
    arguments += ["trainer.max_steps=9", "trainer.ema_decay=0.5"]
    whole = forked.command(tmp_path, "train", *arguments, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr
    # killed after the checkpoint of step 6: everything later is lost, and a log line of a later step is there
    cut = tmp_path / "cut"
    code = (
        "import mtaccum.training.trainer as t, os, signal\n"
        "save = t.save_checkpoint\n"
        "def kill(state, path, ranks):\n"
        "    save(state, path, ranks)\n"
        "    if path.name == 'last.pt' and state['progress']['steps'] == 6:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "t.save_checkpoint = kill\n"
        "from mtaccum.train import main; main()\n"
    )
    rest = [*arguments, "hydra.run.dir=cut"]
    killed = subprocess.run(
        [sys.executable, "-c", code, *rest], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss/se')

    resumed = forked.command(tmp_path, "train", *rest, "resume=cut")

    assert resumed.returncode == 0, resumed.stderr
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "cut"))
    assert a["progress"] == b["progress"]
    for kind in ("model", "average"):
        for name, value in a[kind].items():
            torch.testing.assert_close(b[kind][name], value, msg=name)
    assert [line["step"] for line in lines_of(cut / "metrics.jsonl")] == [2, 4, 6, 8, 9]
    finished = forked.command(tmp_path, "train", *rest, "resume=cut")
    assert finished.returncode == 2
    assert "has 9 steps already" in finished.stderr


def test_ctrl_c_leaves_a_whole_state_and_the_command_that_goes_on(tmp_path: Path) -> None:
    arguments = ["+tasks=[seg,cls]", *SMALL, "trainer.max_steps=100000", "hydra.run.dir=my run"]
    process = subprocess.Popen(
        command(*arguments),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:  # until it is in the middle of training
        if line.startswith("step 6/"):
            break
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 130
    assert "Traceback" not in error
    state = torch.load(tmp_path / "my run" / "last.pt", weights_only=True)
    steps = state["progress"]["steps"]
    assert f"the state after step {steps} is saved" in output
    go_on = shlex.split(output.splitlines()[-1])
    assert go_on[:3] == ["python", "-m", "mtaccum.train"]
    resumed = run(tmp_path, *go_on[3:], f"trainer.max_steps={steps + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((tmp_path / "my run" / "summary.json").read_text())["steps"] == steps + 1


def test_terminal_gets_a_live_display(tmp_path: Path) -> None:
    """A real pseudo-terminal, as ``script`` gives one."""
    import pty

    arguments = ["+tasks=[seg]", *SMALL, "trainer.max_steps=4", "hydra.run.dir=here"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, command(*arguments), {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120"})
    shown = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other side has closed
            break
        if not data:
            break
        shown += data
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert b"\x1b[" in shown
    assert b"4/4" in shown
    assert "miou" in shown.decode()


def test_the_schedules_agree_on_the_first_step(tmp_path: Path, forked: Forked) -> None:
    losses = {}
    for engine in ("summed", "sequential", "split"):
        done = forked.command(
            tmp_path,
            "train",
            "+tasks=[seg,cls,number,depth]",
            f"engine={engine}",
            *SMALL,
            "trainer.max_steps=1",
            f"hydra.run.dir={engine}",
        )
        assert done.returncode == 0, done.stderr
        (losses[engine],) = lines_of(tmp_path / engine / "metrics.jsonl")
    for engine in ("sequential", "split"):
        for name in ("loss/seg", "loss/cls", "loss/number", "loss/depth"):
            assert losses[engine][name] == pytest.approx(losses["summed"][name], abs=1e-6)
