"""Two ranks: bytes reduced per step, and step time over DDP in every pass: ``python benchmarks/ddp.py``.

Two processes on this machine reduce gradients by gloo. See README.md beside this file.
"""

# no `from __future__ import annotations`: DDP compares those of a communication hook with types

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Case, dense_case
from common import (
    MIB,
    environment,
    environment_line,
    interleaved_times,
    markdown_table,
    ratio_of,
    write_results,
)
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from mtaccum import Engine, InexactWarning, split_batch
from mtaccum.parallel import DDP
from mtaccum.parallel.ddp import COMM_HOOKS

METHOD = (
    "Two processes with one thread each, gloo. Bytes: the gradients that go into all-reduces, counted by a "
    "DDP communication hook. Time: whole steps (forward, backward, reduction, SGD with momentum), of the "
    "slower rank; median over pairs of steps taken right after each other in random order, with its 95 % "
    "bootstrap interval."
)
RANKS = 2
HEADS, MICRO_BATCHES = (1, 4, 8), (1, 4)
TIMED_HEADS = 4
NAIVE = "DDP in every pass"
SIZE = {"width": 64, "pixels": 64, "batch_size": 8}
QUICK = {"width": 8, "pixels": 16, "batch_size": 4}
_SAME = 1e-4  # of the gradient's norm; single precision, and sums in another order
_TIMEOUT_S = 600  # a rank that waits so long has lost the others


class Counter:
    """Counts the bytes of the gradients that are reduced."""

    def __init__(self) -> None:
        self.reduced_bytes = 0

    def hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook of DDP."""
        buffer = bucket.buffer()
        self.reduced_bytes += buffer.numel() * buffer.element_size()
        return allreduce_hook(state, bucket)


class _Naive(nn.Module):
    """A whole model as DDP wants it: one forward for a batch and the name of a task."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = copy.deepcopy(case.model)

    def forward(self, batch: dict[str, Tensor], task: str) -> Tensor:
        assert self.model.trunk is not None
        result: Tensor = self.model.task(task).head(self.model.trunk(batch["image"]))
        return result


def optimizer_of(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=1e-2, momentum=0.9)


def naive_step(
    wrapped: DistributedDataParallel, optimizer: Optimizer, tasks: list[str], window: list[dict[str, Tensor]]
) -> None:
    """A backward for each task and micro-batch, in each of which DDP reduces; the labels are equally many."""
    for batch in window:
        for task in tasks:
            loss = F.cross_entropy(wrapped(batch, task), batch[task]) / len(window)
            loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Steps:
    """Steps of one model by each way, on weights of their own that start alike."""

    def __init__(self, heads: int, micro_batches: int, quick: bool) -> None:
        torch.manual_seed(dist.get_rank())  # data of their own; weights are those of rank 0
        case = dense_case(heads, "cpu", **(QUICK if quick else SIZE))
        for tensor in (*case.model.parameters(), *case.model.buffers()):
            dist.broadcast(tensor.data, src=0)
        learning = [p for p in case.model.parameters() if p.requires_grad]
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in learning)
        tasks = list(case.model.tasks_by_name())
        window = split_batch(case.batch, micro_batches)
        self.counters = {name: Counter() for name in ("split", "sequential", NAIVE)}
        self.optimizers: dict[str, SGD] = {}
        self.run: dict[str, Callable[[], object]] = {}
        for schedule in ("split", "sequential"):
            model = copy.deepcopy(case.model)
            self.optimizers[schedule] = optimizer_of(model)
            COMM_HOOKS[schedule] = self.counters[schedule].hook  # type: ignore[assignment]
            ranks = DDP(comm_hook=schedule)
            engine = Engine(model, self.optimizers[schedule], schedule=schedule, parallel=ranks)
            self.run[schedule] = partial(engine.step, window)
        naive = _Naive(case)
        wrapped = DistributedDataParallel(naive, find_unused_parameters=heads > 1)
        wrapped.register_comm_hook(None, self.counters[NAIVE].hook)
        self.optimizers[NAIVE] = optimizer_of(naive)
        self.run[NAIVE] = partial(naive_step, wrapped, self.optimizers[NAIVE], tasks, window)

    def check_equal(self) -> None:
        """After one step each way's momentum must be the same gradient."""
        gradients = {
            name: torch.cat([state["momentum_buffer"].flatten() for state in optimizer.state.values()])
            for name, optimizer in self.optimizers.items()
        }
        for name, gradient in gradients.items():
            difference = float((gradient - gradients[NAIVE]).norm() / gradients[NAIVE].norm())
            if not difference < _SAME:
                raise SystemExit(
                    f"error: the gradient of {name} differs from that of {NAIVE}: {difference:.1e}"
                )


def count_bytes(quick: bool) -> list[dict[str, Any]]:
    """A row for each number of heads and of micro-batches."""
    rows = []
    for heads in HEADS:
        for micro_batches in MICRO_BATCHES:
            steps = Steps(heads, micro_batches, quick)
            for step in steps.run.values():
                step()
            steps.check_equal()
            before = {name: counter.reduced_bytes for name, counter in steps.counters.items()}
            for step in steps.run.values():
                step()
            reduced = {n: counter.reduced_bytes - before[n] for n, counter in steps.counters.items()}
            whole = steps.gradient_bytes
            row = {"heads": heads, "micro_batches": micro_batches, "gradient_bytes": whole}
            over = {name: count / whole for name, count in reduced.items()}
            rows.append({**row, "reduced_bytes": reduced, "over_gradient_bytes": over})
    return rows


def time_steps(pairs: int, quick: bool) -> list[dict[str, Any]]:
    """A row for each schedule and number of micro-batches: its step's time over that of DDP in every pass."""
    rows = []
    for micro_batches in MICRO_BATCHES:
        steps = Steps(TIMED_HEADS, micro_batches, quick)
        ours = interleaved_times(steps.run, pairs, "cpu", warmups=2)
        both: list[Any] = [None] * RANKS
        dist.all_gather_object(both, ours)
        times = {name: [max(pair) for pair in zip(*(o[name] for o in both), strict=True)] for name in ours}
        rows += [
            {
                "what": f"{TIMED_HEADS} dense heads, K={micro_batches}: {schedule} over {NAIVE}",
                "ratio": asdict(ratio_of(times[schedule], times[NAIVE])),
                "times_s": times[schedule],
                "baseline_times_s": times[NAIVE],
            }
            for schedule in ("sequential", "split")
        ]
    return rows


def measure(rank: int, folder: str, pairs: int, quick: bool) -> None:
    """What each process does; the first one writes what was found into the folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", InexactWarning)  # BatchNorm sees micro-batches, in each of the ways
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    found = {"bytes": count_bytes(quick), "rows": time_steps(pairs, quick)}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # DDP keeps threads of gloo, and one that wants Python while that ends aborts the process


def bytes_table(rows: list[dict[str, Any]]) -> str:
    """The counted bytes as a Markdown table."""
    head = ("heads", "micro-batches", "gradients, MiB", "split", "sequential", NAIVE)
    return markdown_table(
        head,
        [
            (
                str(row["heads"]),
                str(row["micro_batches"]),
                f"{row['gradient_bytes'] / MIB:.2f}",
                *(f"{row['over_gradient_bytes'][name]:.2f}" for name in ("split", "sequential", NAIVE)),
            )
            for row in rows
        ],
        texts=0,
    )


def time_table(rows: list[dict[str, Any]]) -> str:
    """The ratios as a Markdown table."""
    return markdown_table(
        ("step time", "median ratio", "95 % interval", "pairs", "baseline step, ms"),
        [
            (
                row["what"],
                f"{row['ratio']['median']:.3f}",
                f"{row['ratio']['low']:.3f} to {row['ratio']['high']:.3f}",
                str(row["ratio"]["rounds"]),
                f"{1e3 * statistics.median(row['baseline_times_s']):.1f}",
            )
            for row in rows
        ],
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Bytes reduced per step and step time on two ranks.")
    parser.add_argument("--pairs", type=int, help="pairs of steps (default 20)")
    parser.add_argument(
        "--quick", action="store_true", help="small models, 3 pairs: a look, not a measurement"
    )
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=folder, help="folder for table and numbers")
    options = parser.parse_args()
    arguments = [f for f in ("--quick",) if options.quick]
    arguments += ["--pairs", str(options.pairs)] if options.pairs is not None else []
    pairs = options.pairs if options.pairs is not None else 3 if options.quick else 20
    if pairs < 1:
        parser.error(f"--pairs must be at least 1, got {pairs}.")
    torch.set_num_threads(1)  # as in the two processes
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as shared:
        spawn(measure, args=(shared, pairs, options.quick), nprocs=RANKS)  # type: ignore[no-untyped-call]
        found = json.loads((Path(shared) / "found.json").read_text())
    facts = environment("cpu", arguments)
    tables = (
        f"Bytes reduced per step, over the bytes of the gradients:\n\n{bytes_table(found['bytes'])}\n\n"
        f"{time_table(found['rows'])}\n\n{METHOD}"
    )
    print(f"\n{tables}\n{environment_line(facts)}")
    text = f"# Two ranks\n\n{tables}\n\n{environment_line(facts)}"
    results = {"environment": facts, "method": METHOD, "elapsed_s": time.monotonic() - started, **found}
    write_results(options.output, "ddp", text, results)


if __name__ == "__main__":
    main()
