"""Which lines of a package run in which test, also in processes that tests start.

The package's copy is given a line that calls ``follow`` on import. Which test runs now stands in a file that
all processes map into memory; each appends the lines it comes to, the first time in a test, to a file of its
own. Needs nothing but the standard library, since it is copied beside the package.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "BREAKS_REACH_FOLDER"  # where these files are
PACKAGE = "BREAKS_REACH_PACKAGE"  # folders of the package whose lines count, separated by os.pathsep
_CURRENT = "current"
_BYTES = 4

Trace = Callable[[FrameType, str, Any], Any]


class Current:
    """The number of the test that runs now; 0: none."""

    def __init__(self, folder: Path) -> None:
        file = folder / _CURRENT
        if not file.exists():
            file.write_bytes(bytes(_BYTES))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _BYTES)

    def set(self, number: int) -> None:
        self._map[:_BYTES] = number.to_bytes(_BYTES, "little")

    def bytes(self) -> bytes:
        return self._map[:_BYTES]

    def close(self) -> None:
        self._map.close()


def follow() -> None:
    """Note the lines that this process and its forks come to, if the environment says so."""
    if FOLDER not in os.environ:
        return
    folder, packages = Path(os.environ[FOLDER]), tuple(os.environ[PACKAGE].split(os.pathsep))
    current = Current(folder)
    seen: set[tuple[bytes, str, int]] = set()
    file = [os.open(folder / f"lines-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)]

    def forked() -> None:
        file[0] = os.open(folder / f"lines-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def line(frame: FrameType, event: str, _argument: Any) -> Trace:
        if event == "line":
            key = current.bytes(), frame.f_code.co_filename, frame.f_lineno
            if key not in seen:
                seen.add(key)
                number = int.from_bytes(key[0], "little")
                os.write(file[0], f"{number} {key[2]} {key[1]}\n".encode())
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Trace | None:
        return line if frame.f_code.co_filename.startswith(packages) else None

    os.register_at_fork(after_in_child=forked)
    threading.settrace(call)
    sys.settrace(call)


def read(folder: Path) -> dict[str, dict[int, set[int]]]:
    """Numbers of tests by file and line."""
    reached: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("lines-*"):
        for text in file.read_text().splitlines():
            number, line, path = text.split(" ", 2)
            reached[path][int(line)].add(int(number))
    return reached
