"""Ctrl-C: a flag first, an exception if the loop doesn't come around or somebody insists."""

from __future__ import annotations

import signal

import pytest

from mtaccum.training import interrupt as interrupting
from mtaccum.training.interrupt import interruptible


@pytest.fixture(autouse=True)
def _nothing_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is; a test that wants the timer's signal raises it."""
    monkeypatch.setattr(interrupting, "PATIENCE_S", 600.0)


def test_the_first_one_is_a_request() -> None:
    with interruptible() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested


def test_the_second_one_insists() -> None:
    with interruptible():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_when_the_time_is_up_it_is_an_exception() -> None:
    """The timer's signal, delivered without waiting for it."""
    with interruptible():
        signal.raise_signal(signal.SIGINT)
        remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining_s <= 600.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGALRM)


def test_handlers_and_timer_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_loop_that_obeys_has_the_time_it_needs_to_save() -> None:
    with interruptible() as interrupt:
        signal.raise_signal(signal.SIGINT)
        interrupt.obey()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
