"""Plans of configured trainings: shipped options are predicted as they run, and plans train as pasted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtaccum.config import RunConfig, run_command
from mtaccum.config.plan import fake_training
from mtaccum.memory import Prediction
from mtaccum.plan import plan
from mtaccum.train import train

SMALL = [
    *("batch_size=8", "data.train.size=24", "data.val.size=8"),
    *("trainer.max_steps=3", "trainer.eval_every=0", "trainer.log_every=1", "trainer.epochs=null"),
]

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, in a folder of its own: its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(
        command: Callable[[RunConfig], int], *arguments: str, into: str = "run", eval_batch_size: int = 8
    ) -> int:
        rest = [f"data.eval_batch_size={eval_batch_size}", f"hydra.run.dir={tmp_path / into}"]
        return run_command("train", command, [*arguments, *SMALL, *rest])

    return run


def json_in(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


# --- predicted and measured ---------------------------------------------------------------------------------

OPTIONS = {
    **{f"tasks {name}": [f"+tasks=[{name}]"] for name in ("seg", "cls", "number", "depth")},
    "all tasks": ["+experiment=all_tasks"],
    "quick": ["+experiment=quick", "+tasks=[seg,cls]"],
    "no trunk": ["+tasks=[seg,cls]", "trunk=none"],
    "SGD": ["+tasks=[seg,cls]", "optimizer=sgd"],
    "groups of parameters": ["+tasks=[seg,cls]", "optimizer.groups={trunk: {lr: 1e-4}}"],
    "sequential": ["+tasks=[seg,cls]", "engine=sequential", "accumulate=3"],
    "summed": ["+tasks=[seg,cls,depth]", "engine=summed"],
    "recomputed": ["+tasks=[seg,cls]", 'engine.recompute=[trunk.stem,"trunk.levels.*"]', "accumulate=2"],
    "head groups and chunks": [
        "+tasks=[seg,cls,number]",
        "engine.head_groups=[[cls,number]]",
        "engine.chunks={seg:2}",
        "engine.batchnorm=freeze",
    ],
    "half precision": ["+tasks=[seg,cls]", "engine.precision=bf16"],
    "clipped": ["+tasks=[seg,cls]", "engine.max_grad_norm=1"],
    "averaged": ["+tasks=[seg,cls]", "trainer.ema_decay=0.9"],
    "modes": [
        "+tasks=[seg,cls,depth]",
        "tasks.cls.mode=frozen",
        "tasks.seg.mode=detached",
        "tasks.depth.weight=0",
    ],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_trainings_need_what_is_predicted(name: str, run: Run, tmp_path: Path) -> None:
    found: list[Prediction] = []

    def predict(config: RunConfig) -> int:
        found.append(fake_training(config, "cpu")[0].predict(config.engine, config.micro_batches))
        return 0

    assert run(predict, *OPTIONS[name]) == 0
    assert not (tmp_path / "run").exists(), "nothing is written by a prediction"
    assert run(train, *OPTIONS[name]) == 0
    summary = json_in(tmp_path / "run" / "summary.json")
    assert summary["peak_bytes"] == pytest.approx(found[0].peak_bytes, rel=0.01)
    assert summary["peak_stage"] == found[0].stage
    if name != "half precision":
        counter = 8 if name == "averaged" else 0  # of the averages' steps
        assert summary["peak_bytes"] - found[0].peak_bytes == counter
        assert summary["peak_by_kind"]["parameters"] - found[0].by_kind["parameters"] == counter


# --- what a plan leaves -------------------------------------------------------------------------------------


def test_a_plan_leaves_its_report_and_pictures_of_it(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(plan, "+tasks=[seg,cls]", "memory.budget=6MiB", eval_batch_size=5000) == 0
    assert "evaluation takes data.eval_batch_size=5000 samples at once" in capsys.readouterr().out
    assert {path.name.split(".tfevents")[0] for path in (tmp_path / "run").iterdir()} == {
        "plan.json",
        "plan.png",
        "events.out",
    }
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert events.Tags()["images"] == ["memory/plan"]
    (picture,) = events.Images("memory/plan")
    assert (picture.step, picture.width) == (0, 900)
    report = json_in(tmp_path / "run" / "plan.json")
    assert report["budget"]["total_bytes"] == 6 * 2**20
    assert report["recommended"]["peak_bytes"] <= 6 * 2**20
    assert report["batch_size"] == 8


def test_where_matplotlib_is_missing_the_report_is_left_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run(plan, "+tasks=[seg,cls]", "memory.budget=6MiB") == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["plan.json"]


@pytest.mark.long
def test_a_plan_changes_nothing_of_the_training(run: Run, tmp_path: Path) -> None:
    """The same steps as with what the plan recommends, typed by hand: planning draws no random numbers."""
    options = ["+tasks=[seg,cls]", "memory.budget=5MiB", "engine.batchnorm=freeze"]
    assert run(train, *options, "plan=auto", into="auto") == 0
    report = json_in(tmp_path / "auto" / "plan.json")
    assert run(train, *options, *report["recommended"]["overrides"], into="typed") == 0
    auto, typed = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("auto", "typed")
    )
    for line in (*auto, *typed):
        del line["samples_per_s"]
    assert auto == typed
    assert len(auto) == 3
    states = [torch.load(tmp_path / run / "last.pt", weights_only=True)["model"] for run in ("auto", "typed")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    summary = json_in(tmp_path / "auto" / "summary.json")
    assert summary["peak_bytes"] == pytest.approx(report["recommended"]["peak_bytes"], rel=0.01)
    assert summary["peak_bytes"] <= 1.01 * 5 * 2**20


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("accumulate=2", "accumulate"),
        ("micro_batch_size=2", "micro_batch_size"),
        ("engine.recompute=[trunk]", "engine.recompute"),
        ("engine.head_groups=[[seg,cls]]", "engine.head_groups"),
        ("engine.chunks={seg:2}", "engine.chunks"),
        ("engine=sequential", "engine=sequential"),
    ],
)
@pytest.mark.parametrize("command", [plan, train])
def test_what_a_plan_chooses_is_not_given_too(
    command: Callable[[RunConfig], int],
    option: str,
    name: str,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command, "+tasks=[seg,cls]", "plan=auto", "memory.budget=1GiB", option) == 2
    assert f"{name}: a plan chooses that. Leave it out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_training_that_fits_in_no_way_does_not_start(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(train, "+tasks=[seg,cls]", "plan=auto", "memory.budget=100KiB") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: nothing fits 100.0 KiB (102,400 bytes). The smallest peak found is ")
    assert "parameters" in error
    assert not (tmp_path / "run").exists()


def test_labels_that_are_not_there_are_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["+tasks=[number,cls]", "tasks.cls.target=nothing", "memory.budget=6MiB"]
    assert run(plan, *arguments) == 0
    printed = capsys.readouterr().out
    assert "no label of cls was found, so it is not planned for" in printed
    assert "evaluation" not in printed


def test_what_cannot_be_predicted_is_explained(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_trunk.py").write_text(
        "import torch\n\n\nclass Trunk(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.rnn = torch.nn.LSTM(32, 8)\n\n"
        "    def forward(self, x):\n        return self.rnn(x.flatten(1, 2))[0].unsqueeze(1)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    head = "{_target_: torch.nn.Flatten}"
    arguments = [
        "~trunk",
        "+trunk={_target_: my_trunk.Trunk}",
        f"++tasks.cls.head={head}",
        "memory.budget=6MiB",
    ]
    assert run(plan, "+tasks=[cls]", *arguments) == 2
    assert "recurrent layers can't be predicted" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
