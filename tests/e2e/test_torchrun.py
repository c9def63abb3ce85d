"""Training on several ranks as a user types it: one run and one voice, and an end for all where one fails.

Where torchrun itself matters, it starts the ranks; the others are forked, which takes less time, and shows
that they end without somebody who ends them.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import LIMIT_S, Forked, environment, without_warning

import mtaccum
from mtaccum.data import DigitScenes
from mtaccum.training import load_checkpoint

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = [
    "batch_size=8",
    "data.train.size=44",
    "data.val.size=17",
    "data.eval_batch_size=8",
    "trainer.log_every=1",
    "trainer.eval_every=2",
    "trainer.checkpoint_every=2",
]
FILES = {"config.yaml", "summary.json", "metrics.jsonl", "validation.jsonl", "last.pt", "best.pt"}
# What goes wrong on rank 1 in step 3, and a look at the random numbers of each rank.
PLUGIN = """
import json, os, signal
from pathlib import Path
import torch
from mtaccum import Classification, register_task
from mtaccum.data import DigitScenes
from mtaccum.training import interrupt

RANK = os.environ.get("RANK", "0")
interrupt.PATIENCE_S = 600.0  # how long a step takes after Ctrl-C is the machine's

class Failing(Classification):
    steps = 0
    def loss(self, prediction, batch):
        loss = super().loss(prediction, batch)
        if torch.is_grad_enabled():
            self.steps += 1
            if self.steps >= 3 and RANK == "1":
                Path(f"failed-{type(self).__name__}").touch()
                return self.fail(loss)
        return loss

@register_task("raises")
class Raises(Failing):
    def fail(self, loss):
        raise RuntimeError("out of luck")

@register_task("hangs")
class Hangs(Failing):
    def fail(self, loss):
        while True:
            signal.pause()

@register_task("killed")
class Killed(Failing):
    def fail(self, loss):
        os.kill(os.getpid(), signal.SIGKILL)

@register_task("divides")
class Divides(Failing):
    def fail(self, loss):
        return loss * 0 / 0

@register_task("undrawable")
class Undrawable(Classification):
    def draw(self, prediction, batch):
        raise ValueError("draw went wrong")

class NamingLogger:
    def log(self, step, scalars):
        raise RuntimeError("igloo of log")
    def close(self):
        pass

class FailingLogger:
    def log(self, step, scalars):
        if step:
            [][step]
    def close(self):
        pass

class Augmented(DigitScenes):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index, "noise": torch.rand(())}

@register_task("noting")
class Noting(Classification):
    def loss(self, prediction, batch):
        if torch.is_grad_enabled():
            seen = [batch["index"].tolist(), batch["noise"].tolist(), torch.rand(()).item()]
            with open(f"seen-{RANK}", "a") as file:
                file.write(json.dumps(seen) + "\\n")
        return super().loss(prediction, batch)
"""

# A training whose rank 0 says nothing of others that have gone, and whose other ranks don't say what rank 0
# says, for longer than a test lasts: where torchrun ends them, that isn't because they came late to speak.
SLOW_TO_SPEAK = """
import os
from mtaccum.config import ranks
from mtaccum.train import main

ranks.PATIENCE_S = 0.0 if os.environ["RANK"] == os.environ.get("SPEAKS") else 3600.0
main()
"""


def task(kind: str) -> list[str]:
    """The options for a task of the plugin."""
    return [f"+tasks.{kind}={{type: {kind}, num_classes: 10, target: cls}}", "plugins=[awkward_tasks]"]


def start(
    folder: Path, *arguments: str, module: str = "mtaccum.train", nodes: str = "", speaks: int = 0
) -> Any:
    """torchrun on two ranks of this machine, or as ``nodes`` says; ``speaks``: see ``SLOW_TO_SPEAK``."""
    where = shlex.split(nodes or "--nproc-per-node 2")
    return subprocess.Popen(
        [*TORCHRUN, *where, "-m", module, *arguments],
        cwd=folder,
        env={**environment(folder), "SPEAKS": str(speaks)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: Any) -> list[subprocess.CompletedProcess[str]]:
    """What came of processes; they and their ranks are killed where they hang."""
    done = []
    try:
        for process in processes:
            output, error = process.communicate(timeout=LIMIT_S)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, output, error))
    finally:
        for process in processes:
            process.terminate()  # nothing to one that has ended; torchrun ends its ranks
    return done


def job(folder: Path, *arguments: str, **options: Any) -> dict[str, Any]:
    (folder / "awkward_tasks.py").write_text(PLUGIN)
    return {"folder": str(folder), "arguments": [*arguments], **options}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def state(folder: Path) -> dict[str, Any]:
    return load_checkpoint(folder / "last.pt")


def empty_folders(folder: Path) -> list[Path]:
    """Those that the command left; torchrun and PyTorch leave some of their own."""
    foreign = ("torchelastic_", "torchinductor_")
    return [
        path
        for path in folder.rglob("*")
        if path.is_dir()
        and not any(path.iterdir())
        and not any(part.startswith(foreign) for part in path.parts)
        and path.name != "temporary"
    ]


# --- a training on two ranks, and what goes on from it ----------------------------------------------------


@pytest.fixture(scope="module")
def trained(
    forked: Forked, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Two tasks trained on two ranks: ``here``; and in one process with twice the batch: ``alone``."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = ["+tasks=[seg,cls]", *SMALL, "trainer.max_steps=4"]
    process = start(folder, *arguments, "data.workers=1", "hydra.run.dir=here")
    twice = ["batch_size=16", "accumulate=2", "hydra.run.dir=alone"]
    (alone,) = forked.run(job(folder, *arguments, *twice, ranks=0))
    (done,) = finish(process)
    assert done.returncode == 0, done.stderr
    assert alone.codes == [0], alone.err
    return folder, done


def test_one_folder_and_one_voice_c2(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = trained

    found = {path.name for path in (folder / "here").iterdir()}
    assert {name for name in found if not name.startswith("events.")} == FILES
    assert len(found) == len(FILES) + 1
    assert {path.name for path in folder.iterdir()} == {"here", "alone", "temporary", "awkward_tasks.py"}
    assert empty_folders(folder) == []
    counts = Counter(re.findall(r"^(training|step \d+|validation after step \d+)", done.stdout, re.MULTILINE))
    steps = [f"step {step}" for step in (1, 2, 3, 4)]
    assert counts == dict.fromkeys(["training", *steps, *(f"validation after {s}" for s in steps[1::2])], 1)
    assert done.stdout.count("peak memory") == 1
    assert "4 steps of 8 samples on each of 2 ranks" in done.stdout
    assert without_warning(done.stderr) == ""


def test_metrics_are_those_of_one_process_with_twice_the_batch(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = trained
    here, alone = summary(folder / "here"), summary(folder / "alone")

    assert (here["ranks"], here["batch_size"], alone["ranks"], alone["batch_size"]) == (2, 8, 1, 16)
    # 44 samples by 16: two whole batches and one of 12, then the next epoch
    assert here["samples"] == alone["samples"] == 44 + 16
    both = zip(lines_of(folder / "here/metrics.jsonl"), lines_of(folder / "alone/metrics.jsonl"), strict=True)
    for ours, theirs in both:
        for name in ("loss/seg", "loss/cls", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
        assert ours["count/cls"] == theirs["count/cls"]
    close_metrics(here, alone)


def close_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Running statistics are means over ranks here, and moved one after the other there."""
    for name in ("seg", "cls"):
        assert ours["tasks"][name]["loss"] == pytest.approx(theirs["tasks"][name]["loss"], rel=0.02)
    assert ours["tasks"]["seg"]["pixel_accuracy"] == pytest.approx(
        theirs["tasks"]["seg"]["pixel_accuracy"], abs=0.02
    )


def check_loads(folder: Path) -> None:
    """``mtaccum.load`` gives a model of the usual names, which does what the summary says."""
    model = mtaccum.load(folder, state="last")
    scenes = DigitScenes("val", size=17)
    metrics = mtaccum.evaluate(model, [torch.utils.data.default_collate([scenes[i] for i in range(17)])])
    for name, values in summary(folder)["tasks"].items():
        assert metrics[name] == pytest.approx(values, rel=1e-4, abs=1e-6)
    assert list(state(folder)["model"]) == list(model.state_dict())


@pytest.mark.long
def test_two_nodes_go_on_with_fsdp_and_three_ranks_after_them(
    trained: tuple[Path, subprocess.CompletedProcess[str]], forked: Forked, tmp_path: Path
) -> None:
    check_loads(trained[0] / "here")
    folder, logs = tmp_path / "more", tmp_path / "logs"
    folder.mkdir()
    arguments = ["+tasks=[seg,cls]", *SMALL]
    more = [*arguments, "trainer.max_steps=5", f"resume={trained[0]}/here"]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    node = f"--nnodes 2 --nproc-per-node 1 --rdzv-endpoint {endpoint} --node-rank"
    # The second node's rank writes to files: its torchrun complains where the first one's ends before it.
    nodes = [f"{node} 0", f"{node} 1 --redirects 3 --log-dir {shlex.quote(str(logs))}"]
    fsdp = [*more, "parallel=fsdp", "hydra.run.dir=fsdp"]
    processes = [start(folder, *fsdp, nodes=node) for node in nodes]
    alone = [*more, "batch_size=16", "accumulate=2", "hydra.run.dir=more"]
    (one,) = forked.run(job(folder, *alone, ranks=0))
    first, second = finish(*processes)

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "going on from step 4" in first.stdout
    written = {path.name: path.read_text() for path in logs.rglob("*.log")}
    assert written == {"stdout.log": "", "stderr.log": ""}
    assert one.codes == [0], one.err
    close_metrics(summary(folder / "fsdp"), summary(folder / "more"))
    losses = [lines_of(folder / name / "metrics.jsonl")[-1]["loss/seg"] for name in ("fsdp", "more")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    check_loads(folder / "fsdp")
    assert state(folder / "fsdp")["progress"]["samples_in_epoch"] == 32

    rest = [*arguments, "trainer.max_steps=7", "resume=fsdp", "hydra.run.dir=three"]
    (three,) = forked.run(job(folder, *rest, ranks=3))
    assert three.codes == [0, 0, 0], three.err
    # the 12 samples that were left of the epoch, and then batches of 24
    assert [line["count/cls"] for line in lines_of(folder / "three/metrics.jsonl")] == [12, 24]
    assert summary(folder / "three")["samples"] == 44 + 32 + 12 + 24
    assert empty_folders(folder) == []


def test_resuming_must_know_what_is_left(
    trained: tuple[Path, subprocess.CompletedProcess[str]], forked: Forked
) -> None:
    folder, _ = trained
    arguments = ["+tasks=[seg,cls]", *SMALL, "resume=here", "hydra.run.dir=other"]
    epochs, size = forked.run(
        job(folder, *arguments, "trainer.max_steps=null", "trainer.epochs=3", ranks=0),
        job(folder, *arguments, "batch_size=4", "trainer.max_steps=9", ranks=0),
    )
    assert (epochs.codes, size.codes) == ([2], [2])
    assert "a step on 1 ranks has 8 samples, and had 16 on 2" in epochs.err[0]
    assert "batch_size: 4 (was 8)" in size.err[0]


# --- all end well -----------------------------------------------------------------------------------------

# A thread of gloo that lets go of a tensor while Python ends aborts the process.
ENDING = """
import atexit, os
from pathlib import Path
import torch
import torch.distributed as dist
from mtaccum.config.ranks import leave
from mtaccum.parallel import joined

def groups():
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop\\n")

with joined() as ranks:
    kept = dist.new_group()
    for group in (None, ranks.host, kept):
        dist.barrier(group)
    before = groups()
print(f"{before} groups, then {groups()}\\n", end="", flush=True)

for _ in range(2000):
    dist.all_reduce(torch.rand(2), group=kept, async_op=True)
atexit.register(print, "goodbye\\n", end="")
leave(0)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_nothing_of_gloo_aborts_a_process_that_ends_well(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    (done,) = finish(start(tmp_path, module="ending"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["3 groups, then 1"] * 2 + ["goodbye"] * 2


# --- one rank fails ---------------------------------------------------------------------------------------


def test_an_error_on_one_rank_ends_the_job_on_all_d5(tmp_path: Path) -> None:
    """By torchrun: rank 0 would wait for rank 1 for an hour, and finishes within the limit of ``finish``."""
    (tmp_path / "awkward_tasks.py").write_text(PLUGIN)
    (tmp_path / "slow.py").write_text(SLOW_TO_SPEAK)
    arguments = [*task("raises"), *SMALL, "parallel.timeout_s=3600", "hydra.run.dir=here"]
    (done,) = finish(start(tmp_path, *arguments, module="slow", speaks=1))

    assert (tmp_path / "failed-Raises").exists()
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert errors == ["rank 1: error: the loss of task 'raises', given Tensor(6, 10): out of luck"]
    before_torchrun = done.stderr.split("torch/distributed/elastic")[0]
    assert "Traceback" not in before_torchrun
    assert state(tmp_path / "here")["progress"]["steps"] == 2
    assert empty_folders(tmp_path) == []


FAULTS = "hangs", "killed", "divides", "logger", "config", "draws", "names"
LOST = "rank 0: error: lost another rank: it has ended, or didn't come within parallel.timeout_s. "


@pytest.mark.long
def test_what_one_rank_does_is_noticed_by_the_other(forked: Forked, tmp_path: Path) -> None:
    """Nobody ends rank 0 here, and it would wait for an hour where rank 1 comes to an end."""
    common = [*SMALL, "parallel.timeout_s=3600"]
    folders = {name: tmp_path / name for name in FAULTS}
    for folder in folders.values():
        folder.mkdir()
    logger = ["+tasks=[cls]", "plugins=[awkward_tasks]", "loggers=[{_target_: awkward_tasks.FailingLogger}]"]
    only_there = ["+tasks=[cls]", "seed=${oc.env:RANK}000000000000"]  # 0 on rank 0, too large on rank 1
    naming = [*logger[:2], "loggers=[{_target_: awkward_tasks.NamingLogger}]"]
    hangs, killed, divides, logs, config, draws, names = forked.run(
        hanging(folders["hangs"], timeout_s=5),
        job(folders["killed"], *task("killed"), *common, "hydra.run.dir=here"),
        job(folders["divides"], *task("divides"), *common, "hydra.run.dir=here"),
        job(folders["logger"], *logger, *common, "hydra.run.dir=here"),
        # rank 1 never joins, so the time for that runs out on any machine
        job(folders["config"], *only_there, *SMALL, "parallel.timeout_s=5"),
        job(folders["draws"], *task("undrawable"), *common, "hydra.run.dir=here"),
        job(folders["names"], *naming, *common, "hydra.run.dir=here"),
    )

    timeout_s = 5
    while not (folders["hangs"] / "failed-Hangs").exists():  # too short for this machine to come to step 3
        assert timeout_s < 300
        timeout_s *= 4
        (hangs,) = forked.run(hanging(folders["hangs"], timeout_s))
    assert hangs.codes == [1, -9]
    assert hangs.err[0].startswith(LOST)
    assert f"Timed out waiting {timeout_s}000ms" in hangs.err[0]
    assert state(folders["hangs"] / f"here-{timeout_s}")["progress"]["steps"] == 2

    assert killed.codes == [1, -9]
    assert killed.err[0].startswith(LOST)
    assert "Timed out" not in killed.err[0]
    assert state(folders["killed"] / "here")["progress"]["steps"] == 2

    assert divides.codes == [2, 2]
    assert divides.err[0].startswith("rank 0: error: step 3: rank 1: the loss of task 'divides' is nan")
    assert state(folders["divides"] / "here")["progress"]["steps"] == 2

    # only rank 0 draws, and all have saved before it fails
    assert draws.codes == [2, 1]
    assert draws.err[0].startswith("rank 0: error: ")
    assert "draw went wrong" in draws.err[0]
    assert state(folders["draws"] / "here")["progress"]["steps"] == 2

    assert names.err[0].endswith("rank 0: error: RuntimeError: igloo of log\n")  # gloo hasn't said that

    # what nobody explains is traced, and the rank named
    assert logs.codes == [1, 1]
    assert logs.err[0].startswith("Traceback")
    assert logs.err[0].endswith("\nrank 0: error: IndexError: list index out of range\n")
    assert logs.err[1].startswith("rank 1: error: lost another rank")

    assert config.codes == [1, 2]
    assert config.err[0].startswith(LOST)
    assert config.err[1].startswith("rank 1: error: seed: input should be less than")
    assert empty_folders(tmp_path) == []


def hanging(folder: Path, timeout_s: int) -> dict[str, Any]:
    """Rank 1 hangs in step 3, and is killed once rank 0 has ended."""
    arguments = [*SMALL, f"parallel.timeout_s={timeout_s}", f"hydra.run.dir=here-{timeout_s}"]
    return job(folder, *task("hangs"), *arguments, ends_rest=True)


def test_ctrl_c_leaves_a_whole_state_and_the_command_that_goes_on(forked: Forked, tmp_path: Path) -> None:
    arguments = ["+tasks=[cls]", "plugins=[awkward_tasks]", *SMALL]
    arguments += ["trainer.max_steps=100000", "trainer.eval_every=0"]
    begun = tmp_path / "here" / "metrics.jsonl"
    (stopped,) = forked.run(job(tmp_path, *arguments, "hydra.run.dir=here", interrupt_at=str(begun)))

    assert stopped.codes == [130, 130]
    assert stopped.err == ["", ""]
    assert stopped.out[1] == ""
    steps = state(tmp_path / "here")["progress"]["steps"]
    assert f"interrupted; the state after step {steps} is saved. Go on with:" in stopped.out[0]
    go_on = shlex.split(stopped.out[0].splitlines()[-1])
    assert go_on[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "mtaccum.train"]
    (resumed,) = forked.run(job(tmp_path, *go_on[5:], f"trainer.max_steps={steps + 1}"))
    assert resumed.codes == [0, 0], resumed.err
    assert summary(tmp_path / "here")["steps"] == steps + 1


# --- what is refused --------------------------------------------------------------------------------------


def test_what_all_ranks_have_to_say_is_said_once(tmp_path: Path) -> None:
    arguments = ["+tasks=[seg,cls]", "engine.shedule=split"]
    (tmp_path / "slow.py").write_text(SLOW_TO_SPEAK)
    (done,) = finish(start(tmp_path, *arguments, module="slow"))

    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(said) == 1
    assert said[0].startswith("rank 0: error: unknown key in engine: 'shedule'. Did you mean 'schedule'?")
    assert empty_folders(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "slow.py"}


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "multirun": ({}, ["--multirun", "batch_size=4,8"], "--multirun starts one training after the other"),
    "mode": ({}, ["hydra.mode=MULTIRUN", "batch_size=4,8"], "--multirun starts one training after the other"),
    "none": ({}, ["parallel=none"], "parallel=none would train the same on each rank. Start it without"),
    "auto": ({}, ["plan=auto"], "plan=auto plans for one process. Run python -m mtaccum.plan, and give"),
    "plan": ({"command": "plan"}, [], "this command runs in one process: start it by python -m, without"),
    "verify": ({"command": "verify"}, [], "this command runs in one process: start it by python -m, without"),
    "ema": (
        {},
        ["parallel=fsdp", "trainer.ema_decay=0.9"],
        "trainer.ema_decay doesn't go with parallel=fsdp",
    ),
    "ddp": ({"ranks": 0}, ["parallel=ddp"], "parallel=ddp needs several processes: torchrun --nproc-per"),
    "fsdp": ({"ranks": 0}, ["parallel=fsdp"], "parallel=fsdp needs several processes: torchrun --nproc-per"),
}


def test_what_makes_no_sense_is_refused(forked: Forked, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in REFUSED]
    for folder in folders:
        folder.mkdir()
    found = forked.run(
        *[
            job(folder, "+tasks=[seg,cls]", *SMALL, *arguments, **options)
            for folder, (options, arguments, _) in zip(folders, REFUSED.values(), strict=True)
        ]
    )
    for name, ended, (options, _, message) in zip(REFUSED, found, REFUSED.values(), strict=True):
        assert set(ended.codes) == {2}, (name, ended.err)
        for rank, error in enumerate(ended.err):
            prefix = "" if options.get("ranks") == 0 else f"rank {rank}: "
            assert error.startswith(f"{prefix}error: {message}"), (name, error)
            assert error.count("error: ") == 1, (name, error)
        assert all(out == "" for out in ended.out)
    assert empty_folders(tmp_path) == []


def test_options_may_stand_behind_overrides(forked: Forked, tmp_path: Path) -> None:
    (tmp_path / "configs" / "tasks").mkdir(parents=True)
    (tmp_path / "configs" / "tasks" / "mine.yaml").write_text("# @package tasks.mine\ntype: classification\n")
    shown, chosen = forked.run(
        job(tmp_path, "+tasks=[cls]", "--cfg", "job"),
        job(tmp_path, "+tasks=[mine]", "--config-dir", "configs", "--cfg", "job"),
    )
    for ended, name in ((shown, "cls"), (chosen, "mine")):
        assert ended.codes == [0, 0], ended.err
        assert f"\n  {name}:" in ended.out[0]
        assert ended.out[1] == ""


# --- how it is started ------------------------------------------------------------------------------------


def test_torchrun_with_one_process_is_as_without_it(forked: Forked, tmp_path: Path) -> None:
    arguments = ["+tasks=[cls]", *SMALL, "trainer.max_steps=2"]
    ended = forked.run(
        job(tmp_path, *arguments, "hydra.run.dir=one", "parallel=ddp", ranks=1),
        job(tmp_path, *arguments, "hydra.run.dir=without", ranks=0),
    )
    assert [e.codes for e in ended] == [[0], [0]], [e.err for e in ended]
    a, b = state(tmp_path / "one"), state(tmp_path / "without")
    for name, value in a["model"].items():
        assert torch.equal(value, b["model"][name])


def test_random_numbers_are_each_ranks_own_and_the_order_is_shared(forked: Forked, tmp_path: Path) -> None:
    data = ["data.train._target_=awkward_tasks.Augmented", "data.val._target_=awkward_tasks.Augmented"]
    arguments = [*task("noting"), *SMALL, *data, "data.workers=1", "trainer.max_steps=3"]
    (ended,) = forked.run(job(tmp_path, *arguments, "hydra.run.dir=here"))
    assert ended.codes == [0, 0], ended.err

    seen = [[json.loads(line) for line in (tmp_path / f"seen-{r}").read_text().splitlines()] for r in (0, 1)]
    indices = [index for rank in seen for indices, _, _ in rank for index in indices]
    assert sorted(indices) == list(range(44))  # one epoch, nothing twice
    for which in (1, 2):  # augmentation in the workers, and dropout in the step
        drawn = [rank_numbers for rank in seen for rank_numbers in [step[which] for step in rank]]
        flat = [x for numbers in drawn for x in (numbers if isinstance(numbers, list) else [numbers])]
        assert len(set(flat)) == len(flat)


LOOP = """
import torch
from torch import nn
import mtaccum
from mtaccum import Classification, Engine, MultiTaskModel, windows
from mtaccum.parallel import in_step

torch.manual_seed(0)
data = [{"x": torch.randn(4, 3), "y": torch.randint(2, (4,))} for _ in range(5)]
with mtaccum.parallel.joined(timeout_s=600) as ranks:
    torch.manual_seed(ranks.rank)
    task = Classification(2, head=nn.Linear(4, 2), target="y")
    model = MultiTaskModel(nn.Linear(3, 4), {"a": task}, inputs="x")
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mine = data[ranks.rank :: ranks.world_size]  # three batches and two
    for window in in_step(windows(mine, 2 // ranks.world_size)):
        result = engine.step(window)
        print(result.losses["a"].item(), result.counts["a"])
    engine.accumulate([mine[0]])
    mtaccum.reduce_gradients(model)
    print(model.trunk.weight.grad.sum().item())
    print(mtaccum.evaluate(model, mine))
"""


def test_a_loop_of_ones_own_does_the_same_on_two_ranks(forked: Forked, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    both, alone = forked.run(
        job(tmp_path, command=str(tmp_path / "loop.py")),
        job(tmp_path, command=str(tmp_path / "loop.py"), ranks=0),
    )
    assert (both.codes, alone.codes) == ([0, 0], [0]), (both.err, alone.err)
    assert both.out[0] == both.out[1]
    numbers = r"-?\d[-+.e\d]*"
    found = [[float(x) for x in re.findall(numbers, e.out[0])] for e in (both, alone)]
    assert len(both.out[0].splitlines()) == 5
    # steps and metrics; what accumulate adds is of one batch there, and of two here
    assert found[0][:6] == pytest.approx(found[1][:6], rel=1e-4)
    assert found[0][7:] == pytest.approx(found[1][7:], rel=1e-4)
