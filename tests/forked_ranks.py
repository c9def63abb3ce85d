"""Commands, on ranks or not, that are forked from a process that has imported everything already.

A script that reads a line of JSON from standard input, a list of jobs to run at the same time, and answers by
one, a list of what came of each. What ``torchrun`` sets in the environment is set here too, but nobody ends
the other ranks where one fails: that they have to notice by themselves.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# what trainings import on their way
MODULES = (
    *("mtaccum.train", "mtaccum.plan", "mtaccum.verify", "torchmetrics", "torch.utils.tensorboard"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "tensorboard.summary"),
)


@dataclass
class Job:
    """A command on some ranks.

    Attributes:
        folder: where they run.
        output: what they print goes to files in this folder, ``out-0``, ``err-0`` and so on.
        arguments: of the command.
        command: ``train``, ``plan`` or ``verify``; or a script's path, which then gets no arguments.
        ranks: how many; 0: one process, not by torchrun.
        interrupt_at: Ctrl-C comes when this file is there.
        ends_rest: whether the others are killed as soon as one has ended.
        limit_s: after so long what still runs is killed; only what hangs meets it.
    """

    folder: str
    output: str
    arguments: list[str]
    command: str = "train"
    ranks: int = 2
    interrupt_at: str | None = None
    ends_rest: bool = False
    limit_s: float = 600.0
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    kill_at: float = 0.0

    def start(self) -> None:
        self.kill_at = time.monotonic() + self.limit_s
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        for rank in range(max(self.ranks, 1)):
            self.pids.append(os.fork())
            if self.pids[-1] == 0:
                self._be(rank, port)

    def _be(self, rank: int, port: int) -> None:
        """What the forked process does; it doesn't return."""
        code: Any = 70
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(f"{self.output}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, number)
            os.chdir(self.folder)
            sys.path.insert(0, self.folder)
            if self.ranks:
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_PORT": port}
                os.environ.update({name: str(number) for name, number in numbers.items()})
                os.environ.update(LOCAL_WORLD_SIZE=str(self.ranks), MASTER_ADDR="localhost")
            if self.command.endswith(".py"):
                runpy.run_path(self.command, run_name="__main__")
            else:
                sys.argv = [f"mtaccum.{self.command}", *self.arguments]
                importlib.import_module(f"mtaccum.{self.command}").main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def poll(self) -> bool:
        """Whether all have ended."""
        if self.interrupt_at is not None and Path(self.interrupt_at).exists():
            self.interrupt_at = None
            for pid in self.pids:
                os.kill(pid, signal.SIGINT)
        late = time.monotonic() > self.kill_at or (self.ends_rest and bool(self.codes))
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                if late:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def result(self) -> dict[str, Any]:
        return {"codes": [self.codes[rank] for rank in range(len(self.pids))]}


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        jobs = [Job(**values) for values in json.loads(line)]
        for job in jobs:
            job.start()
        while len([job for job in jobs if job.poll()]) < len(jobs):
            time.sleep(0.02)
        print(json.dumps([job.result() for job in jobs]), flush=True)


if __name__ == "__main__":
    main()
