"""The accuracy of predictions and plans as a user looks at it, with the libraries that are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from accuracy_cases import ADAMW, OF_CONFIG, Spec, subject_of
from accuracy_tables import PARTS, missed
from planner_accuracy import all_jobs, configs
from resident import unavailable

from mtaccum.config import group_options
from mtaccum.engine import SCHEDULES

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIBRARIES = ("timm", "torchvision")
MISSING = [library for library in LIBRARIES if importlib.util.find_spec(library) is None]
NOT_HERE = unavailable()

Written = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What the command shows, the tables' file, and the numbers."""
    folder = tmp_path_factory.mktemp("accuracy")
    command = [sys.executable, str(FOLDER / "planner_accuracy.py"), "--quick", "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {"planner_accuracy.md", "planner_accuracy.json"}
    text = (folder / "planner_accuracy.json").read_text()
    assert str(folder) not in text
    assert f'"{socket.gethostname()}"' not in text
    return done.stdout, (folder / "planner_accuracy.md").read_text(), json.loads(text)


def test_predicted_peaks_are_those_of_real_steps(written: Written) -> None:
    rows = written[2]["predictions"]
    ways = {(row["schedule"], bool(row["recompute"]), row["accumulate"]) for row in rows}
    assert ways == {(schedule, again, k) for schedule in SCHEDULES for again in (False, True) for k in (1, 4)}
    assert len({row["measured_bytes"] for row in rows}) > len(rows) / 2  # it does matter how a step is run
    for row in rows:
        assert 0.99 <= row["predicted_bytes"] / row["measured_bytes"] <= 1.01, row
        predicted = row["predicted_bytes"] - row["predicted_start_bytes"]
        assert 0.99 <= predicted / (row["measured_bytes"] - row["measured_start_bytes"]) <= 1.01, row


@pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
def test_the_resident_set_of_a_process_grows_as_predicted(written: Written) -> None:
    (row,) = written[2]["resident"]
    assert row["predicted_bytes"] > 300 * 2**20
    assert 0.9 <= row["predicted_bytes"] / row["resident_bytes"] <= 1.1


def test_recommended_plans_keep_to_their_budget(written: Written) -> None:
    rows = written[2]["runs"]
    assert len(rows) == 2 - ("timm" in MISSING)
    for row in rows:
        assert row["smallest_bytes"] < row["budget_bytes"] < row["split_bytes"]
        assert row["measured_bytes"] <= 1.01 * row["budget_bytes"]


def test_a_plan_is_found_for_less_than_half_of_the_memory(written: Written) -> None:
    (row,) = written[2]["plans"]
    assert row["predicted_bytes"] <= 0.44 * row["summed_bytes"]
    assert 1 < row["flops_over_summed"] <= 1.15
    assert any(word.startswith("engine.recompute=") for word in row["overrides"])


def test_what_is_shown_is_what_was_measured(written: Written) -> None:
    shown, text, numbers = written
    for part in PARTS:
        for row in numbers[part]:
            assert f"| {row['model']} " in shown
            assert f"| {row['model']} " in text
    assert numbers["environment"]["command"] == (
        "OMP_NUM_THREADS=1 python benchmarks/planner_accuracy.py --quick"
    )
    for library in LIBRARIES:
        known = "not installed" if library in MISSING else version(library)
        assert numbers["environment"]["versions"][library] == known
        assert f"{library} {known}" in text
    reasons = len([library for library in MISSING if library == "timm"]) + (NOT_HERE is not None)
    assert len(numbers["skipped"]) == reasons
    assert all(reason in text for reason in numbers["skipped"])


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("predictions", {"ratio": 0.98}),
        ("predictions", {"ratio": 1.02}),
        ("resident", {"ratio": 0.8}),
        ("runs", {"over_budget": 1.02}),
        ("runs", {"plan": None}),
        ("plans", {"plan": None}),
        ("plans", {"peak_over_summed": 0.45}),
        ("plans", {"flops_over_summed": 1.2}),
        ("plans", {"elapsed_s": 31.0}),
        ("plans", {"process_peak_bytes": 2**30}),
    ],
)
def test_a_number_beside_its_mark_is_said(written: Written, part: str, change: dict[str, Any]) -> None:
    rows = {name: list(written[2][name]) for name in PARTS}
    if not rows[part]:
        pytest.skip(str(NOT_HERE))
    # how long planning takes is the machine's
    rows["plans"] = [{**row, "elapsed_s": 1.0} for row in rows["plans"]]
    before = missed(rows)
    rows[part][0] = {**rows[part][0], **change}
    assert len(missed(rows)) == len(before) + 1


def test_every_shipped_option_is_among_what_is_predicted() -> None:
    lines = " ".join(configs())
    for group in ("trunk", "optimizer", "experiment"):
        assert all(f"{group}={name}" in lines for name in group_options(group))
    assert all(f"+tasks=[{name}]" in lines for name in group_options("tasks"))
    predicted = [job[1][0].name for (job,) in all_jobs() if job[0] == "predictions"]
    assert set(configs()) < set(predicted)
    assert len([job for (job,) in all_jobs() if job[0] == "runs"]) == 10


@pytest.mark.parametrize(
    ("spec", "optimizer"),
    [
        (Spec("config", "+tasks=[seg,cls] trunk=none"), OF_CONFIG),
        (Spec("timm", "swin_tiny_patch4_window7_224", 2, 56), ADAMW),
        (Spec("timm", "vit_tiny_patch16_224", 2, 64), ADAMW),
        (Spec("timm", "convnext_atto", 2, 64), ADAMW),
    ],
    ids=lambda value: value.name if isinstance(value, Spec) else None,
)
def test_models_of_the_full_benchmark_are_built_and_predicted(
    spec: Spec, optimizer: str, installed: Callable[[Spec], None]
) -> None:
    installed(spec)
    subject = subject_of(spec)
    training = subject.fake(optimizer)
    kept = training.predict()
    again = training.predict(subject.options.changed({"recompute": subject.segments}))
    assert kept.start_bytes == again.start_bytes
    assert again.flops > kept.flops


def test_the_large_model_needs_what_it_is_known_to_need(installed: Callable[[Spec], None]) -> None:
    spec = Spec("deeplab", "3", 8, 288)
    installed(spec)
    subject = subject_of(spec)
    (optimizer,) = subject.optimizers
    summed = subject.options.changed({"schedule": "summed"})
    peak_bytes = subject.fake(optimizer).predict(summed).peak_bytes
    assert peak_bytes / 2**30 == pytest.approx(5.02, abs=0.01)


@pytest.fixture
def installed() -> Callable[[Spec], None]:
    """Skips where the library of a model is missing."""

    def check(spec: Spec) -> None:
        if spec.library in MISSING:
            pytest.skip(f"needs the extra vision: {spec.library}")

    return check
