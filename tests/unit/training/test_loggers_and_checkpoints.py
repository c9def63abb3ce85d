"""Loggers, checkpoints that are whole or not there, and the learning rate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtaccum import ConfigError
from mtaccum.training import (
    JsonLinesLogger,
    batch_factor,
    find_checkpoint,
    load_checkpoint,
    make_lr_scheduler,
    save_checkpoint,
)


def test_json_lines_separate_training_and_validation_and_hold_no_nan(tmp_path: Path) -> None:
    logger = JsonLinesLogger(tmp_path)
    logger.log(1, {"loss/a": 2.0, "lr": float("nan")})
    logger.log(1, {"val/loss": float("inf")})
    logger.close()

    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss/a": 2.0, "lr": None}
    assert json.loads((tmp_path / "validation.jsonl").read_text()) == {"step": 1, "val/loss": None}


def test_json_lines_rewind_drops_later_and_unfinished_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 5}\n{"step": 6}\n{"ste')
    logger = JsonLinesLogger(tmp_path)
    logger.rewind(5)
    logger.log(6, {"x": 1.0})
    logger.close()

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 5, 6]


def test_checkpoint_round_trip_and_where_it_is_found(tmp_path: Path) -> None:
    save_checkpoint({"model": {"w": torch.arange(3)}}, tmp_path / "last.pt")

    for path in (tmp_path, tmp_path / "last.pt"):
        state = load_checkpoint(find_checkpoint(path))
        assert torch.equal(state["model"]["w"], torch.arange(3))
    with pytest.raises(ConfigError, match="no checkpoint"):
        find_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 cut short"])
def test_damaged_checkpoint_is_an_explained_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="can't read the checkpoint"):
        load_checkpoint(tmp_path / "last.pt")


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "other.pt")


def test_a_full_disk_leaves_the_previous_state_whole(tmp_path: Path) -> None:
    """A real failure to write: the process may not make files of more than 100 kB."""
    path = tmp_path / "last.pt"
    save_checkpoint({"w": torch.zeros(4)}, path)
    code = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from mtaccum.training import save_checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    save_checkpoint({'w': torch.ones(1_000_000)}, Path(sys.argv[1]))\n"
        "except OSError as error:\n"
        "    print('OSError', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("OSError")
    assert torch.equal(load_checkpoint(path)["w"], torch.zeros(4))
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_state_is_on_the_disk_before_it_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a loss of power could leave neither."""
    synced: dict[int, int] = {}
    replaced: list[os.stat_result] = []
    fsync, replace = os.fsync, os.replace

    def note_and_sync(file: int) -> None:
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size
        fsync(file)

    def note_and_replace(source: Path, target: Path) -> None:
        replaced.append(source.stat())
        assert source.stat().st_ino in synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    monkeypatch.setattr(os, "replace", note_and_replace)
    for value in (0.0, 1.0):
        save_checkpoint({"w": torch.full((1000,), value)}, tmp_path / "last.pt")
    assert len(replaced) == 2
    assert [synced[status.st_ino] for status in replaced] == [status.st_size for status in replaced]
    assert replaced[0].st_size > 4000
    assert torch.equal(load_checkpoint(tmp_path / "last.pt")["w"], torch.ones(1000))


def test_learning_rate_for_the_larger_batch_n10() -> None:
    """From a stated base batch size; in how many micro-batches the batch is run doesn't enter."""
    assert batch_factor("none", 256, None) == 1
    assert batch_factor("linear", 256, 64) == 4
    assert batch_factor("sqrt", 256, 64) == 2
    assert batch_factor("linear", 64, 64, ranks=2) == 2


def test_course_of_the_learning_rate() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = make_lr_scheduler(optimizer, "cosine", total_steps=10, warmup_steps=2, final_fraction=0.1)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.55)  # half way down from 1 to 0.1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
