"""A task from outside of the repository, added in each of the ways there are, without touching it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mtaccum

SOURCE = '''
import torch.nn.functional as F
from torch import nn

from mtaccum import Task, register_task


@register_task("edges")
class Edges(Task):
    """Which pixels differ in class from their right neighbour."""

    def __init__(self, in_channels, target="seg", weight=1.0, on="trunk"):
        super().__init__(nn.Conv2d(in_channels, 4, 1), target=target, weight=weight, on=on)

    def loss(self, prediction, batch):
        full = F.pixel_shuffle(prediction, 2)[:, 0, :, :-1]
        edges = (batch["seg"][:, :, 1:] != batch["seg"][:, :, :-1]).float()
        return {"bce": F.binary_cross_entropy_with_logits(full, edges), "size": 1e-3 * full.square().mean()}
'''
SMALL = [
    "batch_size=8",
    "data.train.size=16",
    "data.val.size=8",
    "trainer.max_steps=2",
    "trainer.log_every=1",
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of somebody's own, in a folder of its own."""
    folder = tmp_path / "elsewhere"
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "tasks.py").write_text(SOURCE)
    return folder


def train(folder: Path, package: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtaccum.train", *arguments, *SMALL, "hydra.run.dir=run"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["count/edges"] == 8
        assert line["loss/edges"] == pytest.approx(line["loss/edges/bce"] + line["loss/edges/size"], rel=1e-5)
        assert line["loss/seg"] > 0


def test_plugins_and_a_task_on_the_command_line(tmp_path: Path, package: Path) -> None:
    train(
        tmp_path,
        package,
        "+tasks=[seg]",
        "plugins=[my_package.tasks]",
        "+tasks.edges={type: edges, weight: 0.5}",
    )
    sys.path.insert(0, str(package))
    try:
        model = mtaccum.load(tmp_path / "run")  # imports the plugin itself
    finally:
        sys.path.remove(str(package))
    assert model.task("edges").weight == 0.5


def test_a_yaml_in_a_config_dir(tmp_path: Path, package: Path) -> None:
    (tmp_path / "configs" / "tasks").mkdir(parents=True)
    # as people write it: YAML reads the bare `on` as true
    (tmp_path / "configs" / "tasks" / "edges.yaml").write_text(
        "# @package tasks.edges\ntype: edges\non: trunk\n"
    )
    train(
        tmp_path,
        package,
        "--config-dir",
        "configs",
        "tasks=[seg,edges]",
        "plugins=[my_package.tasks]",
    )


def test_an_entry_point(tmp_path: Path, package: Path) -> None:
    """What `pip install` leaves of a package that announces a task; no plugins needed."""
    info = package / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mtaccum.tasks]\nedges = my_package.tasks:Edges\n")
    train(tmp_path, package, "+tasks=[seg]", "+tasks.edges={type: edges}")
