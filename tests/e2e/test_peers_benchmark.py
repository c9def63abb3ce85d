"""The comparison with other ways to the same gradients, as a user runs it, with those that are installed."""

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
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cases import Case, build_case
from peer_measures import compare, state_after
from peer_steps import losses_of, summed_by_hand
from peers import findings

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIBRARIES = ("torchjd", "lightning", "accelerate")
MISSING = [library for library in LIBRARIES if importlib.util.find_spec(library) is None]
# Peer: the library it needs, and between what its activation peak is, over that of the losses summed by hand.
# The quick model's heads are large beside its trunk, so that it shows if they aren't all kept.
PEERS: dict[str, tuple[str | None, float, float]] = {
    "summed": (None, 1.0, 1.0),
    "retaining": (None, 0.3, 0.6),
    "torchjd": ("torchjd", 1.3, 2.5),
    "torchjd-1": ("torchjd", 0.9, 1.1),
    "lightning": ("lightning", 0.999, 1.001),
    "lightning-engine": ("lightning", 0.3, 0.6),
    "accelerate": ("accelerate", 0.999, 1.001),
    "split": (None, 0.3, 0.5),
    "recomputed": (None, 0.1, 0.35),
    "sequential": (None, 0.3, 0.6),
}


Written = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What the command shows, the table's file, and the numbers."""
    folder = tmp_path_factory.mktemp("peers")
    command = [sys.executable, str(FOLDER / "peers.py"), "--quick", "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {"peers.md", "peers.json"}
    text = (folder / "peers.json").read_text()
    assert str(folder) not in text
    assert f'"{socket.gethostname()}"' not in text
    return done.stdout, (folder / "peers.md").read_text(), json.loads(text)


def test_installed_peers_are_measured_and_missing_ones_named(written: Written) -> None:
    shown, table, numbers = written
    rows = {row["peer"]: row for row in numbers["rows"]}
    assert rows.keys() == PEERS.keys()
    assert "live tensor bytes" in table
    for peer, (library, _, _) in PEERS.items():
        row, title = rows[peer], rows[peer]["title"]
        for text in (shown, table):
            (line,) = [line for line in text.splitlines() if line.startswith(f"| {title} ")]
            assert ("skipped" in line) == (library in MISSING)
            assert (f"- {title}: skipped, No module named '{library}'" in text) == (library in MISSING)
        assert ("skipped" in row) == (library in MISSING)
        assert ("activation_bytes" in row) == (library not in MISSING)
    versions = numbers["environment"]["versions"]
    assert versions["torch"] == torch.__version__
    for library in LIBRARIES:
        known = "not installed" if library in MISSING else version(library)
        assert versions[library] == known
        assert f"{library} {known}" in table
    assert numbers["environment"]["command"] == "OMP_NUM_THREADS=1 python benchmarks/peers.py --quick"


def test_all_of_them_compute_the_gradients_of_the_summed_losses(written: Written) -> None:
    _, table, numbers = written
    rows = {row["peer"]: row for row in numbers["rows"] if "skipped" not in row}
    for peer, row in rows.items():
        assert row["gradient_difference"] < 1e-5, peer
        assert row["statistics_difference"] < 1e-5, peer
        assert row["trunk_statistics_updates"] == 1
        assert row["gradients_in_place"]
        # equal conditions: parameters, gradients, buffers and the batch, of the same size for all
        assert row["start_bytes"] == rows["summed"]["start_bytes"] > 0
        assert row["peak_bytes"] == row["start_bytes"] + row["activation_bytes"]
        if peer not in ("summed", "lightning", "accelerate"):  # these do the very same, to the last bit
            assert row["gradient_difference"] > 0
    assert "NOT" not in table


def test_peaks_and_times(written: Written) -> None:
    _, table, numbers = written
    rows = {row["peer"]: row for row in numbers["rows"] if "skipped" not in row}
    for peer, row in rows.items():
        _, low, high = PEERS[peer]
        assert low <= row["activation_bytes"] / rows["summed"]["activation_bytes"] <= high, peer
        ratio = row["time_over_baseline"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert len(row["time_s"]) == len(row["baseline_time_s"]) == ratio["rounds"] == 3
        assert peer == "summed" or f"| {ratio['median']:.2f} (" in table
    assert rows["split"]["activation_bytes"] <= rows["retaining"]["activation_bytes"]
    assert rows["recomputed"]["activation_bytes"] < rows["split"]["activation_bytes"]


def overwriting(case: Case) -> None:
    case.make_gradients()
    summed_by_hand(case)


def forgetting_a_task(case: Case) -> None:
    assert case.model.trunk is not None
    features = case.model.trunk(case.batch["image"])
    losses = losses_of(case.model, case.batch)
    del losses["head3"]
    torch.stack([loss(features) for loss in losses.values()]).sum().backward()


def running_the_trunk_twice(case: Case) -> None:
    assert case.model.trunk is not None
    with torch.no_grad():
        case.model.trunk(case.batch["image"])
    summed_by_hand(case)


def replacing(case: Case) -> None:
    summed_by_hand(case)
    for parameter in case.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (summed_by_hand, None),
        (overwriting, "NOT the gradients"),
        (forgetting_a_task, "NOT the gradients"),
        (running_the_trunk_twice, "NOT BatchNorm's statistics by hand; the trunk's moved 2 times"),
        (replacing, "new tensors"),
    ],
)
def test_a_peer_that_does_something_else_is_told_of(step: Callable[[Case], None], said: str | None) -> None:
    def measured(step: Callable[[Case], None]) -> tuple[Any, bool]:
        case = build_case("dense-8", "cpu", quick=True)
        case.make_gradients()
        step(case)
        return state_after(case, lambda: step(case))

    (reference, _), (state, in_place) = measured(summed_by_hand), measured(step)

    row = {"peer": "x", "title": "x", "gradients_in_place": in_place, **compare(state, reference)}
    sentences = [*findings([row])]

    found = [sentence for sentence in sentences if said is not None and said in sentence]
    assert len(found) == (said is not None)
    assert (sentences == []) == (said is None)
