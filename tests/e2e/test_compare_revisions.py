"""Two revisions compared, as whoever moves code runs it: equal ones are, and one changed line is found."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mtaccum"

# A changed line by its file: what it was, and what it is.
CHANGES = {
    # a loss, and so a gradient, in its last digits
    "engine/functional.py": ("return loss * weight\n", "return loss * weight * 1.0000001\n"),
    # running statistics move too far in a window of several micro-batches
    "engine/norms.py": ("len(numbers) / sum(numbers)", "1.0"),
    # the same gradients in more pieces, sent by C++
    "parallel/ddp.py": ("gradient_as_bucket_view=True", "gradient_as_bucket_view=True, bucket_cap_mb=1e-4"),
}
SINGLE = (
    "functions: split_backward",
    "functions: sequential",
    "inputs_of_varying_size, split, K=3, recompute trunk",
    "options: bf16, K=1",
)


def compare(base: Path, head: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "compare_revisions.py"
    command = [sys.executable, str(script), str(base), "--head", str(head), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def table(output: str, row: str) -> list[int]:
    """The numbers in a table's row."""
    (line,) = re.findall(rf"^\| {re.escape(row)} +\|(.*)\|$", output, re.MULTILINE)
    return [int(number) for number in line.split("|")]


def differences(output: str) -> set[tuple[str, str]]:
    """Case and quantity, the latter without what it is of, of all that is named."""
    found = re.findall(r"^(\w+: .*)\n    (\S.*)\n      base .*\n      head ", output, re.MULTILINE)
    return {(case, quantity.split(":")[0]) for case, quantity in found}


def test_the_working_tree_is_equal_to_itself() -> None:
    done = compare(ROOT, ROOT, "--ranks", "1", "--rounds", "1", "--only", *SINGLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nNothing differs.\n")
    # cases, equal, differing, refused
    assert table(done.stdout, "functions") == [4, 4, 0, 0]
    assert table(done.stdout, "architectures") == [1, 1, 0, 0]
    assert table(done.stdout, "options") == [1, 1, 0, 0]
    for quantity in ("gradients", "buffers", "random state", "peak bytes", "FLOPs"):
        assert table(done.stdout, quantity) == [6, 0], quantity
    assert table(done.stdout, "predicted peak bytes") == [2, 0]
    assert re.search(r"^\| split, K=3 +\| .* \| \d\.\d\d \(.* to .*\) \|$", done.stdout, re.MULTILINE)


def test_what_one_changed_line_does_is_found_and_named(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "mtaccum", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in CHANGES.items():
        path = tmp_path / "mtaccum" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} has changed; this test needs another line of it"
        path.write_text(text.replace(before, after), encoding="utf-8")

    done = compare(
        ROOT, tmp_path, "--all", "--rounds", "0", "--only", *SINGLE, "the same on both, split, K=1"
    )

    assert done.returncode == 1, done.stdout + done.stderr
    recomputed = "architectures: inputs_of_varying_size, split, K=3, recompute trunk"
    on_ranks = "ddp: the same on both, split, K=1"
    assert differences(done.stdout) == {
        ("functions: split_backward", "gradients"),
        ("functions: split_backward of a function", "gradients"),
        ("functions: split_backward, recomputed", "gradients"),
        ("functions: sequential_backward", "gradients"),
        (recomputed, "buffers"),
        # DDP makes its buckets anew once it has seen a backward
        (f"{on_ranks}, rank 0", "collectives of a later step"),
        (f"{on_ranks}, rank 1", "collectives of a later step"),
    }
    assert f"{recomputed}\n    buffers: trunk.1.running_mean\n      base float64[3] " in done.stdout
    assert re.search(r"later step: allreduce of \d+ bytes\n      base 1\n      head nothing", done.stdout)
    assert table(done.stdout, "fsdp") == [2, 2, 0, 0]
    assert done.stdout.endswith("\nCases that differ: 7.\n")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("revisions.report")


def test_a_case_that_failed_or_was_not_run_is_never_equal(report: Any) -> None:
    failed = {("options", "a"): {"failed": "KeyError: 'x'"}}
    (found,) = report.compare(failed, failed)
    assert (found.case, found.quantity, found.base, found.head) == ("a", "failed", *["KeyError: 'x'"] * 2)
    (found,) = report.compare({("options", "a"): {"losses": {}}}, {})
    assert (found.quantity, found.base, found.head) == ("case", "was run", "was not run")


def test_gradients_that_are_none_differ_from_zeros(report: Any) -> None:
    base = {("options", "a"): {"gradients": {"w": None, "b": "0"}, "FLOPs": 7}}
    head = {("options", "a"): {"gradients": {"w": "0", "b": "0"}, "FLOPs": 7}}
    (found,) = report.compare(base, head)
    assert (found.quantity, found.base, found.head) == ("gradients: w", None, "0")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout with its history")
def test_a_revision_is_checked_out_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    run = importlib.import_module("revisions.run")
    with run.checked_out("HEAD", tmp_path / "base") as folder:
        assert (folder / "mtaccum" / "__init__.py").is_file()
    assert not folder.exists()
    listed = subprocess.check_output(["git", "-C", str(ROOT), "worktree", "list"], text=True)
    assert str(folder) not in listed
    with pytest.raises(
        SystemExit, match="'no-such' is neither a folder with the package in it nor a revision"
    ):
        run.checked_out("no-such", tmp_path / "base").__enter__()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout with its history")
def test_what_is_kept_is_kept_by_commit_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    kept, run = (importlib.import_module(f"revisions.{name}") for name in ("kept", "run"))
    where = partial(kept.kept_file, tmp_path / "kept", cases=ROOT)
    file = where("HEAD", arguments=["--quick"])
    assert file == where("HEAD", arguments=["--quick"])
    assert file != where("HEAD", arguments=[])
    assert where(str(ROOT), arguments=[]) is None  # a folder may change
    (tmp_path / "written").write_text("a line\n")
    side = run.Side("base", ROOT, ROOT, [tmp_path / "written"], ["a process of base failed"])
    kept.keep(side, file)
    assert not file.exists()
    side.failures.clear()
    kept.keep(side, file)
    assert file.read_text() == "a line\n"
