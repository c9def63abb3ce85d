"""Several ranks on a machine's cards: a step of all of them is that of one process, by DDP and by FSDP.

With several cards each rank has one, and NCCL carries the gradients. With one card two ranks share it over
gloo (NCCL refuses that), and a group of a single rank shows that NCCL works here. On the CPU: gloo. As a
script it is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_setting import NotHere, Setting
from gpu_subjects import quietly, small_subject
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mtaccum import Engine, MultiTaskModel, split_batch
from mtaccum.parallel import current_ranks, shard

__all__ = ["ranks"]

_MOST, _LIMIT_S = 4, 120.0
_LOOPBACK = Path("/sys/class/net/lo")
_SAME = 1e-10  # of the gradient's norm, in double precision


def ranks(setting: Setting) -> Iterator[dict[str, Any]]:
    """A row for each kind of parallel training and backend."""
    if not dist.is_available():
        raise NotHere("this PyTorch was built without torch.distributed")
    cards = torch.cuda.device_count() if setting.cuda else 0
    nccl = setting.cuda and dist.is_nccl_available()
    jobs: list[tuple[str, str, int]] = []  # kind, backend, ranks
    if cards > 1 and nccl:
        jobs += [(kind, "cpu:gloo,cuda:nccl", min(cards, _MOST)) for kind in ("ddp", "fsdp")]
    elif nccl:
        jobs += [("one rank", "cpu:gloo,cuda:nccl", 1)]
    if cards == 1:
        jobs += [("ddp", "gloo", 2)]
    if not setting.cuda:
        jobs += [(kind, "gloo", 2) for kind in ("ddp", "fsdp")]
    wrong = []
    for index, (kind, backend, number) in enumerate(jobs):
        found = _run(setting, kind, backend, number, setting.folder / f"group-{index}")
        yield {"kind": kind, "backend": backend, "ranks": number, "cards": cards, "difference": found}
        if not found <= _SAME:
            wrong.append(f"{kind}, {backend}, {number} ranks: {found:.1e}")
    if wrong:
        raise RuntimeError(f"gradients differ from those of one process by {'; '.join(wrong)}")


def _run(setting: Setting, kind: str, backend: str, number: int, store: Path) -> float:
    """Start the ranks; what the first one says of the difference."""
    processes = []
    for rank in range(number):
        device = setting.device if not setting.cuda or number == 1 or backend == "gloo" else f"cuda:{rank}"
        arguments = ["--kind", kind, "--backend", backend, "--rank", rank, "--ranks", number]
        arguments += ["--device", device, "--store", store]
        variables = {**os.environ, "LOCAL_RANK": str(rank)}
        if _LOOPBACK.exists():  # all are on this machine, whose name need not lead anywhere
            variables.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
        command = [sys.executable, __file__, *map(str, arguments)]
        processes.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    started = time.monotonic()
    try:
        # until all have ended, or one has failed, for which the others may wait long
        while (codes := [process.poll() for process in processes]) != [0] * number:
            if any(codes) or time.monotonic() > started + _LIMIT_S:
                raise RuntimeError(
                    f"{kind}, {backend}: exit codes {codes} after {time.monotonic() - started:.0f} s (None: "
                    f"still running); what the ranks said is above"
                )
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].stdout is not None
    return float(json.loads(processes[0].stdout.read().splitlines()[-1])["difference"])


# --- one rank ----------------------------------------------------------------------------------------------


def whole_step(device: str, number: int) -> tuple[MultiTaskModel, list[list[Any]]]:
    """A model in double precision, and the windows of all ranks: images of their own, ragged."""
    torch.manual_seed(0)
    subject = small_subject()
    model = subject.build().double().to(device)
    windows = []
    for rank in range(number):
        images = torch.randn(subject.batch["image"].shape, dtype=torch.float64)
        windows.append(split_batch({**subject.batch, "image": images}, 1 + rank % 2))
    return model, windows


def gradients(model: Any, window: list[Any], **options: Any) -> dict[str, Tensor]:
    """Of one step, as the optimizer gets them, whole."""
    found: dict[str, Tensor] = {}

    def look(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            gradient: Any = parameter.grad
            if gradient is not None:
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[name] = whole.clone()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quietly(Engine(model, optimizer, on_gradients=look, **options).step, window)
    return found


def difference(own: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference over that of the gradient."""
    if own.keys() != other.keys():
        return float("inf")
    apart = torch.stack([(own[name] - other[name]).norm() for name in other]).norm()
    return float(apart / torch.stack([value.norm() for value in other.values()]).norm())


def pass_through_ddp(model: nn.Module) -> None:
    """What reduces gradients once they are added up: a pass through DDP that touches every parameter."""

    class Touching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.touched = nn.ParameterList(model.parameters())

        def forward(self) -> Tensor:
            return torch.stack([p.reshape(-1)[:0].sum() for p in self.touched]).sum()

    DistributedDataParallel(Touching(), gradient_as_bucket_view=True)().backward()


def one_rank(device: str) -> float:
    """In a group of one rank the engine trains as without a group, and DDP's pass leaves gradients alone."""
    model, (window,) = whole_step(device, 1)
    quietly(Engine(model).accumulate, window)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    pass_through_ddp(model)
    after = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return difference(after, before)


def compared(kind: str, device: str, rank: int, number: int) -> float:
    """A step of this rank with the others, over the same of one process with all their micro-batches."""
    model, windows = whole_step(device, number)
    together = [batch for window in windows for batch in window]
    alone = gradients(model, together, parallel="none")
    model, windows = whole_step(device, number)
    if kind == "fsdp":
        shard(model)
    return difference(gradients(model, windows[rank]), alone)


def main() -> None:
    """Join the others, compare, and say it in a line of JSON."""
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--backend", "--device", "--store"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--ranks"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(options.device).index or 0)
    dist.init_process_group(
        options.backend,
        init_method=f"file://{options.store}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    if options.kind == "one rank":
        largest = one_rank(options.device)
    else:
        here = compared(options.kind, options.device, options.rank, options.ranks)
        (largest,) = current_ranks().all_reduce_max([here])
    print(json.dumps({"difference": largest}), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # DDP keeps threads of gloo, and one that wants Python while that ends aborts the process


if __name__ == "__main__":
    main()
