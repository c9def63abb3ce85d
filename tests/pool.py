"""Processes that stand for ranks: started once, and then given one function after another to run together."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp

SIZE = 3
LIMIT_S = 600.0  # for a function on all ranks: only what hangs meets it, however busy the machine is
_AFTER_ERROR_S = 3.0  # what the other ranks get to say something too, once one has failed


class Pool:
    """Up to three ranks, each a process with gloo. A function that fails or hangs fails its test, and the
    next one gets new processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._group, self._ranks = 0, 0

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank. It must be importable from its file.

        Raises:
            AssertionError: it raised or hung; with the ranks' tracebacks.
        """
        if not self._processes:
            self._start()
        if ranks != self._ranks:
            self._group, self._ranks = self._group + 1, ranks
        where = function.__module__, inspect.getfile(function)
        work = pickle.dumps((function, arguments))
        for rank, connection in enumerate(self._connections[:ranks]):
            connection.send_bytes(pickle.dumps((where, self._group, rank, ranks, work)))
        results, errors = self._results(ranks)
        if errors or len(results) < ranks:
            self.stop()
            raise AssertionError(self._explained(ranks, results, errors))
        return [results[rank] for rank in range(ranks)]

    def _start(self) -> None:
        # a server that has imported PyTorch once, and forks; Windows has none
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        multiprocessing.set_forkserver_preload(["pool", "ranked", "pytest"])
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._folder.name, rank), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for connection in self._connections:
            assert connection.poll(LIMIT_S), "a process didn't start"
            connection.recv_bytes()

    def _results(self, ranks: int) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections[:ranks])}
        while waiting:
            ready = wait(list(waiting), _AFTER_ERROR_S if errors else LIMIT_S)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process is gone"
                (results if succeeded else errors)[rank] = value
        return results, errors

    def _explained(self, ranks: int, results: dict[int, Any], errors: dict[int, str]) -> str:
        lines = []
        for rank in range(ranks):
            if rank in errors:
                lines.append(f"rank {rank} raised:\n{errors[rank]}")
            elif rank not in results:
                stack = _stack_file(self._folder.name, rank)
                lines.append(f"rank {rank} didn't end:\n{stack.read_text() if stack.is_file() else ''}")
        return "\n".join(lines)

    def stop(self) -> None:
        """End the processes; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._ranks = [], [], 0

    def close(self) -> None:
        """End the processes for good."""
        self.stop()
        self._folder.cleanup()


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


def _serve(connection: Connection, folder: str, number: int) -> None:
    """What each process does: take functions, run them, send what they return."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what warns is tested in one process
    joined = 0
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        (name, path), group, rank, ranks, work = pickle.loads(message)
        with _stack_file(folder, number).open("w") as stack:
            faulthandler.dump_traceback_later(LIMIT_S - 5, file=stack)
            try:
                if group != joined:
                    _join(Path(folder) / f"group-{group}", rank, ranks)
                    joined = group
                _imported(name, path)
                function, arguments = pickle.loads(work)
                answer = True, function(*arguments)
            except BaseException:
                answer = False, traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(answer))


def _join(file: Path, rank: int, ranks: int) -> None:
    if dist.is_initialized():
        gc.collect()  # models in circles of references go before the group that they use
        dist.destroy_process_group()
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )


def _imported(name: str, path: str) -> None:
    """Load a test's file under the name that it has in the process that runs the tests."""
    if name in sys.modules:
        return
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
