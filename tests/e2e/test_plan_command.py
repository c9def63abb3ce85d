"""python -m mtaccum.plan and plan=auto: what a user types, and what comes of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Forked

EVALUATES = "data.eval_batch_size=16"
SHORT = ["trainer.max_steps=2", "trainer.eval_every=0", "data.train.size=64", "data.val.size=16"]


def typed(name: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"mtaccum.{name}", *arguments, EVALUATES]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def plan(arguments: list[str], folder: Path, forked: Forked) -> subprocess.CompletedProcess[str]:
    options = ["batch_size=32", f"hydra.run.dir={folder / 'plan'}", EVALUATES]
    return forked.command(folder, "plan", *options, *arguments)


def json_in(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


@pytest.mark.long
def test_what_is_recommended_trains_within_the_budget_when_pasted(tmp_path: Path) -> None:
    options = ["batch_size=32", "memory.budget=20MiB", f"hydra.run.dir={tmp_path / 'plan'}"]
    done = typed("plan", ["+tasks=[seg,cls,depth]", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.rstrip().splitlines()
    assert sum(line.startswith("->") for line in lines) == 2
    pasted = shlex.split(lines[-1])
    report = json_in(tmp_path / "plan" / "plan.json")
    assert pasted == report["recommended"]["overrides"]
    assert {"summed", "split", "sequential"} == set(report["schedules"])

    assert (tmp_path / "plan" / "plan.png").stat().st_size > 10_000
    assert list((tmp_path / "plan").glob("events.out.tfevents.*"))

    trained = typed(
        "train", ["+tasks=[seg,cls,depth]", *pasted, *SHORT, f"hydra.run.dir={tmp_path / 'run'}"], tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    summary = json_in(tmp_path / "run" / "summary.json")
    assert summary["peak_bytes"] == pytest.approx(report["recommended"]["peak_bytes"], rel=0.01)
    assert summary["peak_bytes"] <= 1.01 * 20 * 2**20
    assert sum(summary["peak_by_kind"].values()) == summary["peak_bytes"]


def test_what_does_not_fit_is_explained_and_ends_with_1(tmp_path: Path, forked: Forked) -> None:
    done = plan(["+tasks=[seg,cls]", "memory.budget=1MiB"], tmp_path, forked)
    assert done.returncode == 1
    smallest = json_in(tmp_path / "plan" / "plan.json")["smallest"]
    assert f"{smallest['peak_bytes']:,} bytes" in done.stdout
    assert "parameters" in done.stdout
    assert json_in(tmp_path / "plan" / "plan.json")["recommended"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["memory.budget=6GiBs"],
            "'6GiBs' is no amount of memory. Valid is a number with a unit, such as 6GiB",
        ),
        (["memory.budget=0"], "above 0"),
        (["memory.budget=-3GiB"], "Valid is a number with a unit"),
        (["memory.budget=900TiB"], "more than cpu has"),
        (["accumulate=2"], "accumulate: a plan chooses that"),
        (["engine.recompute=[trunk]"], "engine.recompute: a plan chooses that"),
        (["memory.bugdet=3GiB"], "Did you mean 'budget'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_options_are_refused_with_what_is_valid(
    arguments: list[str], words: str, tmp_path: Path, forked: Forked
) -> None:
    done = plan(["+tasks=[seg]", *arguments], tmp_path, forked)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "plan").exists()


def test_an_absent_card_is_labelled_an_estimate_with_its_reserve(tmp_path: Path, forked: Forked) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = plan(["+tasks=[seg,cls]", "memory.budget=2GiB", "device=cuda"], tmp_path, forked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("An estimate for a CUDA card that isn't there")
    assert "in reserve for context, workspaces and fragmentation" in done.stdout


def test_a_training_plans_by_itself(tmp_path: Path, forked: Forked) -> None:
    arguments = ["+tasks=[seg,cls]", "plan=auto", "memory.budget=18MiB", "batch_size=32", *SHORT, EVALUATES]
    done = forked.command(tmp_path, "train", *arguments, f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    report = json_in(tmp_path / "run" / "plan.json")
    assert report["reasons"] in done.stdout
    summary = json_in(tmp_path / "run" / "summary.json")
    assert summary["schedule"] == report["recommended"]["schedule"]
    assert summary["accumulate"] == report["recommended"]["accumulate"]
    assert summary["peak_bytes"] <= 1.01 * 18 * 2**20
    refused = forked.command(
        tmp_path, "train", *arguments, "accumulate=2", f"hydra.run.dir={tmp_path / 'other'}"
    )
    assert refused.returncode == 2
    assert "accumulate: a plan chooses that" in refused.stderr
    assert not (tmp_path / "other").exists()
