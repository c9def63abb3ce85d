"""Trainings on several ranks: that of one process, and gone on with by any number of them."""

from __future__ import annotations

import copy
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal_states
from pool import Pool
from ranked import KINDS, assert_close, engine_of, made
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mtaccum import Classification, Engine, MultiTaskModel, Regression
from mtaccum.config import RunConfig, run_command
from mtaccum.config.run import prepare
from mtaccum.data import MicroBatchSampler
from mtaccum.parallel import Collectives, SingleProcess, current_ranks, full_tensor
from mtaccum.structure import map_tensors
from mtaccum.training import Trainer, TrainerSettings, load_checkpoint

kinds = pytest.mark.parametrize("kind", KINDS)
SAMPLES = 26


def build(norm: bool = False) -> MultiTaskModel:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh())
    tasks = {
        "cls": Classification(2, head=nn.Linear(8, 2), target="cls", class_weights=[0.7, 1.0]),
        "y": Regression(head=nn.Linear(8, 1), target="y", weight=0.5),
    }
    return MultiTaskModel(trunk, tasks, inputs="x").double()


def samples() -> list[dict[str, Tensor]]:
    """Some of them without a label of one of the tasks."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(SAMPLES):
        x = torch.rand(4, generator=generator, dtype=torch.float64)
        y = x.sum() if index % 3 else torch.tensor(float("nan"), dtype=torch.float64)
        made.append({"x": x, "cls": (x[0] > x[1]).long() if index % 4 else torch.tensor(-100), "y": y})
    return made


class Notes:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.lines.append((step, dict(scalars)))

    def close(self) -> None:
        pass


def trainer(
    kind: str, folder: Path, batch_size: int, *, accumulate: int = 1, norm: bool = False, **settings: Any
) -> Trainer:
    ranks = current_ranks()
    model = made(lambda: build(norm), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = samples()
    sampler = MicroBatchSampler(SAMPLES, batch_size, accumulate, rank=ranks.rank, ranks=ranks.world_size)
    return Trainer(
        engine_of(kind, model, optimizer, lr_scheduler=scheduler, max_grad_norm=1.0),
        DataLoader(data, batch_sampler=sampler),  # type: ignore[arg-type]
        sampler,
        DataLoader(data, batch_size=7, sampler=range(ranks.rank, SAMPLES, ranks.world_size)),  # type: ignore[arg-type]
        TrainerSettings(**{"total_steps": 9, "log_every": 1, "eval_every": 2, **settings}),
        folder,
        [Notes()] if ranks.is_rank_zero else [],
    )


def full_state(trainer: Trainer) -> dict[str, Any]:
    return map_tensors(trainer.state_dict(), full_tensor, strict=False)


def fit(kind: str, folder: str, batch_size: int, options: dict[str, Any], resume: str | None = None) -> Any:
    training = trainer(kind, Path(folder), batch_size, **options)
    loaded = None
    if resume is not None:
        torch.manual_seed(1234)
        training.load_state_dict(load_checkpoint(Path(resume) / "last.pt"))
        loaded = copy.deepcopy({**full_state(training), "own rng": torch.get_rng_state()})
    outcome = training.fit()
    notes = [log.lines for log in training.loggers]
    return outcome, notes, full_state(training), loaded


def numbers(lines: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    """What was logged, but for the speed, and what is measured in bytes on one rank."""
    return [
        (step, {k: v for k, v in line.items() if k not in ("samples_per_s", "peak_bytes")})
        for step, line in lines
    ]


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (2, 2), (3, 1)])
@kinds
def test_a_training_is_that_of_one_process(
    pool: Pool, tmp_path: Path, kind: str, ranks: int, accumulate: int
) -> None:
    several, single = tmp_path / "several", tmp_path / "single"
    several.mkdir()
    single.mkdir()

    found = pool.run(fit, kind, str(several), 4, {"accumulate": accumulate}, ranks=ranks)

    outcome, [lines], state, _ = fit("ddp", str(single), 4 * ranks, {})
    for theirs, _, their_state, _ in found:
        assert (theirs.steps, theirs.samples) == (outcome.steps, outcome.samples)
        for task, metrics in outcome.evaluation.items():
            assert theirs.evaluation[task] == pytest.approx(metrics, rel=1e-6)
        for name, value in state["model"].items():
            assert_close(name, their_state["model"][name], value)
    assert [len(notes) for _, notes, *_ in found] == [1] + [0] * (ranks - 1)
    for (step, ours), (also, theirs) in zip(numbers(found[0][1][0]), numbers(lines), strict=True):
        assert step == also
        assert ours == pytest.approx(theirs, rel=1e-6)
    saved = load_checkpoint(several / "last.pt")
    assert_equal_states(saved["model"], found[0][2]["model"])
    assert saved["progress"]["steps"] == 9
    assert (several / "best.pt").is_file()


def same_optimizer_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["param_groups"] == other["param_groups"] and all(
        torch.equal(value, other["state"][index][name])
        for index, entry in one["state"].items()
        for name, value in entry.items()
    )


@pytest.mark.parametrize(
    ("before", "kind", "ranks"),
    [("ddp", "fsdp", 3), ("fsdp", "ddp", 3), ("fsdp", "fsdp", 3), ("ddp", "one", 1), ("fsdp", "one", 1)],
)
def test_a_state_is_that_of_any_number_of_ranks_r1(
    pool: Pool, tmp_path: Path, before: str, kind: str, ranks: int
) -> None:
    first, then, in_one_go = (tmp_path / name for name in ("first", "then", "in_one_go"))
    for folder in (first, then, in_one_go):
        folder.mkdir()
    pool.run(fit, before, str(first), 6, {"total_steps": 4})
    saved = load_checkpoint(first / "last.pt")

    options = {"total_steps": 8}
    if ranks == 1:
        found = [fit("ddp", str(then), 12, options, str(first))]
    else:
        found = pool.run(fit, kind, str(then), 4, options, str(first), ranks=ranks)

    *_, one, _ = fit("ddp", str(in_one_go), 12, options)  # never interrupted
    for rank, (_, _, state, loaded) in enumerate(found):
        if rank < len(saved["random"]):
            assert torch.equal(loaded["own rng"], saved["random"][rank]["torch"])
        assert_equal_states(loaded["model"], saved["model"])
        assert same_optimizer_state(saved["optimizer"], loaded["optimizer"])
        assert loaded["lr_scheduler"] == saved["lr_scheduler"]
        assert loaded["progress"] == saved["progress"]
        for name, value in one["model"].items():
            assert_close(name, state["model"][name], value)
        for index, entry in one["optimizer"]["state"].items():
            for name, value in entry.items():
                assert_close(f"{index}.{name}", state["optimizer"]["state"][index][name], value)


def averaging(folder: str) -> Any:
    """A training with BatchNorm and averaged weights, whose running statistics each rank has its own of."""
    training = trainer("ddp", Path(folder), 4, norm=True, ema_decay=0.5, total_steps=2)
    outcome = training.fit()
    state = training.state_dict()
    assert training.average is not None
    return outcome.evaluation, state["model"], state["average"], training.evaluated_model.state_dict()


def test_running_statistics_are_averaged_before_they_are_used(pool: Pool, tmp_path: Path) -> None:
    (evaluation, model, average, evaluated), *others = pool.run(averaging, str(tmp_path), ranks=3)

    for also, theirs, their_average, _ in others:
        assert also == evaluation
        assert_equal_states(model, theirs)
        assert_equal_states(average, their_average)
    saved = load_checkpoint(tmp_path / "last.pt")
    assert_equal_states(saved["model"], model)
    assert_equal_states(saved["average"], average)
    assert_equal_states({f"module.{k}": v for k, v in evaluated.items()}, {
        k: v for k, v in average.items() if k != "n_averaged"
    })  # fmt: skip


class Looking:
    """A logger that notes a rank's own running mean at each step, before it is saved; and what was saved."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.own: list[Tensor] = []
        self.saved: list[Tensor] = []

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.own.append(self.trainer.model.state_dict()["trunk.1.running_mean"].clone())
        self.saved.append(load_checkpoint(self.trainer.folder / "last.pt")["model"]["trunk.1.running_mean"])

    def close(self) -> None:
        pass


def looking(folder: str) -> tuple[list[Tensor], list[Tensor]]:
    settings = {"total_steps": 3, "eval_every": 0, "checkpoint_every": 1}
    training = trainer("ddp", Path(folder), 4, norm=True, **settings)
    looking = Looking(training)
    training.loggers = [looking]
    training.fit()
    return looking.own[:3], looking.saved


def test_what_is_saved_between_evaluations_has_averaged_statistics(pool: Pool, tmp_path: Path) -> None:
    (first, saved), (second, _) = pool.run(looking, str(tmp_path))

    assert not torch.equal(first[0], second[0])
    for one, other, state in zip(first, second, saved[1:], strict=True):
        assert_close("running_mean", state, (one + other) / 2)


def buffers(seed_apart: float) -> dict[str, Tensor]:
    rank = current_ranks().rank
    module = nn.Module()
    module.register_buffer("mean", torch.tensor([1.0, 2.0, float("inf")]) * (1 + rank * seed_apart))
    module.register_buffer("constant", torch.tensor([i / 97 for i in range(97)]))
    module.register_buffer("wide", torch.tensor([0.1, -math.inf], dtype=torch.float64).expand(3, 2))
    module.register_buffer("number", torch.tensor(3 + rank))
    module.register_buffer("flag", torch.tensor([rank == 0]))
    module.register_buffer("gaps", (torch.arange(8.0) * (1 + rank))[::2])
    layout = torch.channels_last if rank == 0 else torch.contiguous_format
    module.register_buffer("layout", torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=layout))
    current_ranks().average_buffers(module)
    once = {name: buffer.clone() for name, buffer in module.named_buffers()}
    current_ranks().average_buffers(module)
    assert_equal_states(once, dict(module.named_buffers()))
    return once


def test_averages_of_equal_values_are_these_values(pool: Pool) -> None:
    for found in pool.run(buffers, 1.0, ranks=3):
        assert torch.equal(found["mean"], torch.tensor([2.0, 4.0, math.inf]))
        assert torch.equal(found["constant"], torch.tensor([i / 97 for i in range(97)]))
        assert torch.equal(found["wide"][2], torch.tensor([0.1, -math.inf], dtype=torch.float64))
        assert found["number"] == 3
        assert found["flag"].item() is True
        assert torch.equal(found["layout"].flatten(), torch.arange(24.0))
        assert torch.equal(found["gaps"], torch.tensor([0.0, 4.0, 8.0, 12.0]))


class Interrupting(Notes):
    """A logger that sends Ctrl-C to its own process at a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def log(self, step: int, scalars: dict[str, float]) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted(folder: str) -> Any:
    training = trainer("ddp", Path(folder), 4, eval_every=0)
    training.loggers = [Interrupting(3)] if not current_ranks().is_rank_zero else []
    return training.fit()


def test_ctrl_c_on_one_rank_ends_all_after_the_same_step(pool: Pool, tmp_path: Path) -> None:
    for outcome in pool.run(interrupted, str(tmp_path)):
        assert (outcome.steps, outcome.interrupted) == (3, True)
    assert load_checkpoint(tmp_path / "last.pt")["progress"]["steps"] == 3


def validation_indices(folder: str) -> list[int]:
    found: list[list[int]] = []

    def note(config: RunConfig) -> int:
        found.append(list(prepare(config).trainer.validation.batch_sampler.sampler))  # type: ignore[union-attr]
        return 0

    sizes = ["data.train.size=8", "data.val.size=11"]
    assert run_command("train", note, ["+tasks=[cls]", *sizes, f"hydra.run.dir={folder}"]) == 0
    return found[0]


def test_each_rank_evaluates_its_share_of_the_validation_data_d4(pool: Pool, tmp_path: Path) -> None:
    shares = pool.run(validation_indices, str(tmp_path / "run"), ranks=3)

    assert sorted(index for share in shares for index in share) == list(range(11))
    assert [len(share) for share in shares] == [4, 4, 3]


def without_ranks(folder: str) -> Any:
    """One training on each rank, which know nothing of each other."""
    rank = current_ranks().rank
    model, data = build(), samples()[: 12 + 8 * rank]
    sampler = MicroBatchSampler(len(data), 4)
    training = Trainer(
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), parallel="none"),
        DataLoader(data, batch_sampler=sampler),  # type: ignore[arg-type]
        sampler,
        DataLoader(data, batch_size=5),  # type: ignore[arg-type]
        TrainerSettings(total_steps=3 + 4 * rank, eval_every=2),
        Path(folder) / str(rank),
    )
    assert isinstance(training.engine.ranks, SingleProcess)
    assert training.ranks == Collectives()
    training.folder.mkdir()
    outcome = training.fit()
    return outcome.steps, sorted(path.name for path in training.folder.iterdir())


def test_trainings_side_by_side(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(without_ranks, str(tmp_path))
    assert found == [(3, ["best.pt", "last.pt"]), (7, ["best.pt", "last.pt"])]
