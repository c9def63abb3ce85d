"""The command under torchrun: one run folder, one voice, and an end for all when one fails."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from mtaccum.config.schema import RunConfig
from mtaccum.errors import ConfigError, first_line
from mtaccum.parallel import by_torchrun, joined, launched

_LAUNCH = "torchrun --nproc-per-node 2 -m mtaccum.train ..."
PATIENCE_S = 3.0
# what gloo and NCCL say, in plain RuntimeErrors, of a rank that has gone or doesn't answer
_LOST = re.compile(
    r"gloo/|ProcessGroup|WorkNCCL|NCCL (error|communicator|watchdog|timeout)"
    r"|[Cc]onnection (closed|reset) by peer"
)
_MULTIRUN = re.compile(r"\+{0,2}hydra\.mode=multirun", re.IGNORECASE)


def first() -> bool:
    """Whether this process is the one that writes and prints."""
    return not launched() or os.environ["RANK"] == "0"


def rank_name() -> str:
    """``rank 1: `` before an error under torchrun; nothing otherwise."""
    return f"rank {os.environ['RANK']}: " if launched() else ""


def launcher() -> list[str]:
    """What starts this command again, up to ``-m``; on several nodes torchrun's options are left open."""
    if not launched():
        return ["python"]
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return ["torchrun", *(["--nproc-per-node", here] if here == os.environ["WORLD_SIZE"] else ["..."])]


def let_others_speak(*, of_first: bool = False) -> None:
    """Under torchrun: wait a little before an error is told, since torchrun ends all ranks at the first one
    that fails. So what all have to say is said by rank 0 alone, and what one has to say comes before the
    complaints of the others that it has gone, for which rank 0 waits too (``of_first``).
    """
    if launched() and (of_first or not first()):
        time.sleep(PATIENCE_S)


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """What all ranks would print or warn of is printed by rank 0 alone."""
    if first():
        yield
        return
    silence = warnings.catch_warnings(action="ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), silence:
        yield


def without_folder(arguments: Sequence[str]) -> list[str]:
    """Arguments with which Hydra makes no run's folder, on ranks that don't write."""
    if first():
        return list(arguments)
    # argparse wants all overrides side by side
    overrides = [i for i, a in enumerate(arguments) if not a.startswith("-") and ("=" in a or a[:1] == "~")]
    end = max(overrides, default=len(arguments) - 1) + 1
    return [*arguments[:end], "hydra.run.dir=.", *arguments[end:]]


def check_launch(arguments: Sequence[str], *, trains: bool) -> None:
    """Refuse what makes no sense in several processes: other commands than the training, or several ones."""
    if not launched():
        return
    if not trains:
        raise ConfigError("this command runs in one process: start it by python -m, without torchrun.")
    if any(argument in ("--multirun", "-m") or _MULTIRUN.match(argument) for argument in arguments):
        raise ConfigError(
            "--multirun starts one training after the other, and torchrun one training on several ranks. "
            "Start each with torchrun, from a loop in the shell."
        )


@contextlib.contextmanager
def on_ranks(config: RunConfig) -> Iterator[RunConfig]:
    """With the ranks that torchrun started: the config with the folder of the first one.

    Raises:
        ConfigError: a way to train in parallel that doesn't fit how the command was started.
    """
    kind = config.parallel.kind
    if kind == "none" and launched():
        raise ConfigError("parallel=none would train the same on each rank. Start it without torchrun.")
    if kind not in ("auto", "none") and not by_torchrun():
        raise ConfigError(f"parallel={kind} needs several processes: {_LAUNCH}")
    if config.plan == "auto" and launched():
        raise ConfigError(
            "plan=auto plans for one process. Run python -m mtaccum.plan, and give its options to torchrun."
        )
    with joined(config.parallel.timeout_s) as ranks:
        yield config.model_copy(update={"run_dir": ranks.broadcast_object(config.run_dir)})


def report_unexplained(error: Exception) -> int:
    """Say which rank an error is of that nobody has explained, with its traceback unless it is only that
    another rank has gone; the exit code."""
    lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    lost = lost or isinstance(error, dist.DistError)
    let_others_speak(of_first=lost)
    if lost:
        said = (
            "lost another rank: it has ended, or didn't come within parallel.timeout_s. "
            f"({first_line(error)})"
        )
    else:
        traceback.print_exception(error)
        said = f"{type(error).__name__}: {error}"
    print(f"{rank_name()}error: {said}", file=sys.stderr)
    return 1


def leave(code: int) -> int:
    """The exit code. Under torchrun the process ends here: after a failure without waiting for the others,
    which may wait for it; after a success because DDP never lets go of its process group, and a thread of
    gloo that wants Python once more while that ends brings SIGABRT."""
    if launched():
        if not code:
            atexit._run_exitfuncs()  # what Python would do first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
