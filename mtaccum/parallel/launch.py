"""Launching: joining the process group that torchrun has made."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mtaccum.parallel.collectives import Collectives, current_ranks, forget_groups

TIMEOUT_S = 300.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def by_torchrun() -> bool:
    """Whether torchrun started this process, alone or with others."""
    return all(name in os.environ for name in _VARIABLES)


def launched() -> bool:
    """Whether this process is one of several that torchrun started."""
    return by_torchrun() and int(os.environ["WORLD_SIZE"]) > 1


def local_device() -> torch.device:
    """The device of this rank: its own GPU of the machine, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def joined(timeout_s: float = TIMEOUT_S) -> Iterator[Collectives]:
    """With the other ranks that torchrun started; alone without torchrun, so one script serves for both.

        with mtaccum.parallel.joined() as ranks:
            engine = Engine(model, optimizer)  # gradients are reduced once per step
            ...

    Engines are made inside. It can be entered once in a process: torchrun's store is gone with the first one.

    Args:
        timeout_s: how long a rank waits for the others in one communication, in seconds.
    """
    if not launched() or dist.is_initialized():
        yield current_ranks()
        return
    if (device := local_device()).type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    yield current_ranks()
    # after an error the others may be anywhere; the process ends, and they see that
    forget_groups()
    dist.destroy_process_group()
