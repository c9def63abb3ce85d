"""The command under torchrun: one run folder, one voice, and an end for all when one fails."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence

from mtaccum.config.schema import RunConfig
from mtaccum.errors import ConfigError
from mtaccum.parallel import joined, launched

_LAUNCH = "torchrun --nproc-per-node 2 -m mtaccum.train ..."


def rank_name() -> str:
    """``rank 1: `` before an error under torchrun; nothing otherwise."""
    return f"rank {os.environ['RANK']}: " if launched() else ""


@contextlib.contextmanager
def own_folder() -> Iterator[list[str]]:
    """Overrides that keep Hydra from making a run's folder on ranks that don't write."""
    if not launched() or os.environ["RANK"] == "0":
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        yield [f"hydra.run.dir={folder}"]


def check_launch(arguments: Sequence[str], *, trains: bool) -> None:
    """Refuse what makes no sense in several processes.

    Raises:
        ConfigError: another command than the training, or several trainings.
    """
    if not launched():
        return
    if not trains:
        raise ConfigError("this command runs in one process: start it by python -m, without torchrun.")
    if any(argument in ("--multirun", "-m") for argument in arguments):
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
    if kind not in ("auto", "none") and not launched():
        raise ConfigError(f"parallel={kind} needs several processes: {_LAUNCH}")
    if config.plan == "auto" and launched():
        raise ConfigError(
            "plan=auto plans for one process. Run python -m mtaccum.plan, and give its options to torchrun."
        )
    with joined(config.parallel.timeout_s) as ranks, contextlib.ExitStack() as stack:
        if not ranks.first:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        yield config.model_copy(update={"run_dir": ranks.of_first(config.run_dir)})


def leave(code: int) -> int:
    """The exit code; after a failure under torchrun the process ends here, without waiting for the others,
    which may wait for it."""
    if code and launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
