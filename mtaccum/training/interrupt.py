"""Ctrl-C: stop between two windows if one ends soon, and at once if not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 1.0


class Interrupt:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def obey(self) -> None:
        """The loop ends: what it still does, such as saving, isn't broken off by the first request."""
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """While the block runs, a first Ctrl-C sets ``requested``, so that the loop can end with a whole
    state. If it hasn't within a second (a long step), or at a second Ctrl-C, KeyboardInterrupt is raised.

    Outside of the main thread, where signals can't be handled, Ctrl-C stays as it is.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True
        if hasattr(signal, "setitimer"):  # not on Windows
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)

    def on_timer(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {signal.SIGINT: signal.signal(signal.SIGINT, on_interrupt)}
    if hasattr(signal, "SIGALRM"):
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, on_timer)
    try:
        yield interrupt
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
