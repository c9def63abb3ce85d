"""``benchmarks/gpu.py``: its short form on the CPU, so that the long one runs where nobody has tried it."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mtaccum

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu
import gpu_tests
from gpu_processes import Part, run_part
from gpu_setting import Setting
from gpu_syncs import Synchronisations
from gpu_tables import tables_of
from gpu_transfers import Transfers

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMAND = "--quick --device cpu --budget 3600"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results of the short form, and what it printed."""
    folder = tmp_path_factory.mktemp("short")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), *COMMAND.split(), "--output", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert [path.name for path in folder.iterdir()] == ["gpu.json"]
    text = (folder / "gpu.json").read_text()
    assert str(folder) not in text
    assert f'"{socket.gethostname()}"' not in text
    return json.loads(text), done.stdout


def rows_of(found: dict[str, Any], part: str, table: str = "") -> list[dict[str, Any]]:
    rows = [row for row in found["parts"][part]["rows"] if row.get("table", "") == table]
    assert rows, part
    return rows


def test_every_part_runs_on_the_cpu(short: tuple[dict[str, Any], str]) -> None:
    found, printed = short
    assert {name: part["status"] for name, part in found["parts"].items()} == dict.fromkeys(gpu.PARTS, "ok")
    assert found["quick"] is True
    facts = found["environment"]
    assert facts["command"] == f"OMP_NUM_THREADS=1 python benchmarks/gpu.py {COMMAND}"
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["first_step_norm"] > 0
    for part in gpu.PARTS.values():
        assert f"## {part.title}: ok" in printed


def test_bytes_are_those_of_the_other_benchmarks(short: tuple[dict[str, Any], str]) -> None:
    found = short[0]
    peaks = {(r["case"], r["schedule"]): r for r in rows_of(found, "memory", "passes")}
    assert peaks["dense-8", "split"]["over_summed"] < 0.5
    assert peaks["dense-1", "sequential"]["over_summed"] == 1
    live = {row["way"]: row["live_bytes"] for row in rows_of(found, "memory", "steps")}
    assert live["summed"] > live["split"] > live["split, K=4"]
    for row in rows_of(found, "prediction"):
        assert row["over_live"] == pytest.approx(1, abs=1e-3)
    assert {row["model"].split()[0] for row in rows_of(found, "prediction")} == {"3", "transformer"}
    recomputed = rows_of(found, "recompute", "steps")
    assert recomputed[-1]["live_bytes"] < recomputed[0]["live_bytes"]


def test_the_reserve_is_looked_at_stage_by_stage(short: tuple[dict[str, Any], str]) -> None:
    stages = rows_of(short[0], "reserve")
    assert [row["stage"] for row in stages[:4]] == [
        *("context", "matrix product", "convolution, forwards and backwards", "one step")
    ]
    (compared,) = rows_of(short[0], "reserve", "compared")  # by a prediction as for a card
    assert compared["needed_bytes"] == compared["used_bytes"] - compared["predicted_bytes"]
    assert compared["used_bytes"] == stages[-1]["used_bytes"] > 0


def test_times_are_ratios_of_medians(short: tuple[dict[str, Any], str]) -> None:
    found = short[0]
    assert len(rows_of(found, "time", "pairs")) == 6
    for part in ("time", "precision", "recompute", "offload", "copies", "compile"):
        for row in rows_of(found, part, "steps"):
            ratio = row["ratio"]
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
            assert len(row["times_s"]) == ratio["rounds"] == 3
    norms = {row["way"]: row["norm_over_fp32"] for row in rows_of(found, "precision", "steps")[:3]}
    assert norms == {
        "split": 1,
        "split, bf16": pytest.approx(1, abs=0.05),
        "split, fp16": pytest.approx(1, abs=0.05),
    }
    assert all(row["bytes_per_s"] > 0 for row in rows_of(found, "copies", "link"))


def test_values_are_read_once_a_step_whatever_the_micro_batches(short: tuple[dict[str, Any], str]) -> None:
    reads: dict[str, list[int]] = {}
    for row in rows_of(short[0], "syncs"):
        reads.setdefault(row["way"], []).append(row["reads"])
    for way, numbers in reads.items():
        # one flag for whether all was finite, and one in a scaler
        assert numbers == ([2, 2] if "fp16" in way else [1, 1]), way
    assert len(reads) == 5


def test_ranks_have_the_gradient_of_one_process(short: tuple[dict[str, Any], str]) -> None:
    differences = {row["kind"]: row["difference"] for row in rows_of(short[0], "ranks")}
    assert differences.keys() == {"ddp", "fsdp"}
    assert all(0 <= difference < 1e-12 for difference in differences.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are skipped where there is no CUDA device")
def test_the_marked_tests_are_listed(short: tuple[dict[str, Any], str]) -> None:
    rows = rows_of(short[0], "tests")
    assert {row["outcome"] for row in rows} == {"skipped"}
    assert {row["reason"] for row in rows} == {"needs a CUDA device"}
    assert any("test_tracker.py::test_measure_peak_on_cuda" in row["test"] for row in rows)
    assert f"{len(rows)} skipped: needs a CUDA device" in short[1]


def test_the_tables_show_what_only_a_card_has(short: tuple[dict[str, Any], str]) -> None:
    found = copy.deepcopy(short[0])
    for part in found["parts"].values():
        for row in part["rows"]:
            row |= {key: 3 * 2**20 for key in ("allocated_bytes", "assumed_bytes") if key in row}
            row |= {key: 7 * 2**20 for key in ("reserved_bytes",) if key in row}
            row |= {key: 0.87654 for key in ("over_allocated", "needed_over_assumed") if key in row}
            row |= {key: 41 for key in ("synchronisations",) if key in row}
    for part in ("memory", "prediction", "precision", "recompute", "offload"):
        assert " 3.0 |" in tables_of(part, found)
    assert " 4.0 |" in tables_of("memory", found)  # reserved beyond what is allocated
    assert "0.877 |" in tables_of("prediction", found)
    assert "0.877 |" in tables_of("reserve", found)
    assert " 41 |" in tables_of("syncs", found)


# --- parts that go wrong ------------------------------------------------------------------------------------

PARTS = """
import os, signal, subprocess, sys, threading
from gpu_setting import NotHere

def fine(setting):
    yield {"device": setting.device, "quick": setting.quick}

def fails(setting):
    yield {"n": 1}
    yield {"n": 2}
    raise ZeroDivisionError("in the third row")

def dies(setting):
    yield {"n": 1}
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(setting):
    code = "import fcntl, time; f = open('LOCK', 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code])
    threading.Event().wait()
    yield {}

def lacks(setting):
    raise NotHere("it needs a library")
    yield {}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of parts that go wrong."""
    (tmp_path / "own_parts.py").write_text(PARTS.replace("LOCK", str(tmp_path / "lock")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def part_of(function: str, limit_s: float = 100.0) -> Part:
    return Part(f"the part that {function}", f"own_parts:{function}", limit_s)


def test_a_part_that_goes_wrong_is_reported_and_the_others_go_on(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = gpu.parse(["--output", str(own / "out"), "--budget", "600"])
    parts = {"machine": part_of("fine"), "fails": part_of("fails"), "dies": part_of("dies")}
    parts |= {"hangs": part_of("hangs", 6.0), "lacks": part_of("lacks"), "last": part_of("fine")}
    report = gpu.Report(options, {})

    gpu.run_all(options, parts, report)

    assert report.end() == 1
    found = json.loads((own / "out" / "gpu.json").read_text())
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        "machine": "ok",
        "fails": "failed",
        "dies": "failed",
        "hangs": "timed out",
        "lacks": "skipped",
        "last": "ok",
    }
    assert found["parts"]["fails"]["rows"] == [{"n": 1}, {"n": 2}]
    assert "ZeroDivisionError: in the third row" in found["parts"]["fails"]["reason"]
    assert found["parts"]["dies"]["rows"] == [{"n": 1}]
    assert "exit code -9" in found["parts"]["dies"]["reason"]
    assert found["parts"]["lacks"]["reason"] == "it needs a library"
    assert found["environment"]["device"] == "cuda"
    assert str(Path(__file__).parents[2]) not in json.dumps(found)
    printed = capsys.readouterr().out
    assert "not as it should be: fails (failed), dies (failed), hangs (timed out)" in printed
    with (own / "lock").open("w") as file:  # nothing that it started holds on to anything
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_time_left_a_part_is_not_begun(tmp_path: Path) -> None:
    options = gpu.parse([])
    result = run_part("late", part_of("fine"), options, tmp_path, deadline=time.monotonic() + 1)
    assert (result.status, result.rows) == ("not run", [])
    assert list(tmp_path.iterdir()) == []


def test_where_the_device_is_missing_nothing_else_is_tried(own: Path) -> None:
    options = gpu.parse(["--output", str(own / "out")])
    report = gpu.Report(options, {})
    gpu.run_all(options, {"machine": part_of("lacks"), "last": part_of("fine")}, report)
    assert [*report.found["parts"]] == ["machine"]


def test_only_some_parts(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = gpu.parse(["--output", str(own / "out"), "--only", "time", "syncs"])
    report = gpu.Report(options, {})
    parts = {name: part_of("fine") for name in ("machine", "memory", "time", "syncs")}
    gpu.run_all(options, parts, report)
    assert [*report.found["parts"]] == ["machine", "time", "syncs"]
    assert "no table of syncs: KeyError" in capsys.readouterr().out  # its rows are others; that ends nothing
    assert "--only time syncs" in report.found["environment"]["command"]


def test_what_is_missing_is_said_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.NEEDED, "no_such_library", "some tests")
    gpu.say_missing(gpu.missing())
    assert "missing: no_such_library, for some tests (pip install no_such_library)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"numpy must be installed; nothing was run"):
        gpu.say_missing({"numpy": "anything"})


MARKED = """
import os
import pytest

@pytest.fixture
def broken():
    raise ValueError("while it was made")

@pytest.mark.gpu
def test_good(): pass

@pytest.mark.gpu
def test_bad(): assert 1 == 2

@pytest.mark.gpu
@pytest.mark.skip(reason="no time")
def test_skipped(): pass

@pytest.mark.gpu
def test_of_broken(broken): pass

def test_not_marked(): assert False

@pytest.mark.gpu
def test_fatal(): os._exit(3)
"""


def test_what_becomes_of_marked_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    for folder in ("tests", "scratch"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests" / "test_marked.py").write_text(MARKED)
    (tmp_path / "tests" / "test_lacking.py").write_text("# mark.gpu\nimport no_such_library\n")
    (tmp_path / "tests" / "test_other.py").write_text("assert False\n")
    rows: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match="3 tests failed: .*test_bad, .*test_of_broken, .*test_fatal"):  # noqa: PT012
        for row in gpu_tests.tests(Setting("cpu", True, tmp_path / "scratch")):
            rows[row["test"].removeprefix("tests/")] = row["outcome"], row["reason"]
    assert rows == {
        "test_lacking.py": ("skipped", "ModuleNotFoundError: No module named 'no_such_library'"),
        "test_marked.py::test_good": ("passed", ""),
        "test_marked.py::test_bad": ("failed", "assert 1 == 2"),
        "test_marked.py::test_skipped": ("skipped", "no time"),
        "test_marked.py::test_of_broken": ("error", "ValueError: while it was made"),
        "test_marked.py::test_fatal": ("running", "the process ended in it"),
    }


# --- the counters -------------------------------------------------------------------------------------------


def test_synchronisations_are_counted_by_line() -> None:
    def synchronise() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)

    with Synchronisations(cuda=False) as waits:
        for _ in range(3):
            synchronise()
        warnings.warn("something else", stacklevel=1)
        with warnings.catch_warnings():  # as within a step
            warnings.simplefilter("ignore", mtaccum.InexactWarning)
            synchronise()
    ((place, number),) = waits.places.items()
    assert number == 4
    assert place.startswith("e2e/test_gpu_benchmark.py:")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        synchronise()
    assert len(seen) == 1


def test_transfers_are_counted_by_direction() -> None:
    here = torch.ones(5, 3)
    with Transfers("meta") as moved:
        there = here.to("meta")
        there.clone()
        here.double()
    assert (moved.to_device_bytes, moved.to_host_bytes) == (60, 0)
    with Transfers("cpu") as moved:
        here.to("meta")
    assert (moved.to_device_bytes, moved.to_host_bytes) == (0, 60)
