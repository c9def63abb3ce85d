"""The resident set of a process over one training step, against what was predicted for it. Linux only.

The C library keeps freed memory for itself, and the first step loads code and makes pools; a resident set
says something of tensors only if both are kept out. So: a fresh process whose allocator maps every block
above 64 KiB by itself and gives it back when it is freed, a small step to begin with, all free memory given
back, and then the step.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from pathlib import Path
from typing import Any

from accuracy_cases import Spec, subject_of

from mtaccum import Engine, InexactWarning, split_batch

__all__ = ["ALLOCATOR", "measure_resident", "unavailable"]

# of the process that measures: block sizes in bytes from which glibc's malloc maps, and gives back at once
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_SMALL_STEP = 2  # samples for each micro-batch of the small step
_CLEAR_REFS, _RESET_PEAK = Path("/proc/self/clear_refs"), "5"


def unavailable() -> str | None:
    """Why the resident set can't be measured here, if it can't."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return "needs Linux with glibc"
    try:
        _reset_peak()
    except OSError as error:
        return f"the peak of a resident set can't be reset here ({error.strerror})"
    return None


def measure_resident(spec: Spec, schedule: str, recompute: bool, accumulate: int) -> dict[str, Any]:
    """Peak of the resident set over a step less the resident set at its start, and the prediction of it.

    Parameters, the optimizer's state and the batch are there at the start in both, so they cancel.
    """
    subject = subject_of(spec)
    optimizer_name = next(iter(subject.optimizers))
    segments = subject.segments if recompute else ()
    options = subject.options.changed({"schedule": schedule, "recompute": segments})
    engine = Engine(*subject.real(optimizer_name), options=options)
    small = split_batch(subject.batch, len(subject.batch["image"]) // _SMALL_STEP)[:accumulate]
    window = split_batch(subject.batch, accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        engine.step(small)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _reset_peak()
        start_bytes = _status_bytes("VmRSS")
        engine.step(window)
        peak_bytes = _status_bytes("VmHWM")
    # only now, or what it leaves behind would be part of the start
    predicted = subject.fake(optimizer_name).predict(options, accumulate)
    resident, tensors = peak_bytes - start_bytes, predicted.peak_bytes - predicted.start_bytes
    return {
        "model": spec.title,
        "optimizer": optimizer_name,
        "schedule": schedule,
        "recompute": list(segments),
        "accumulate": accumulate,
        "predicted_bytes": tensors,
        "resident_bytes": resident,
        "resident_start_bytes": start_bytes,
        "ratio": tensors / resident,
    }


def _reset_peak() -> None:
    """Let the peak of the resident set begin anew (``man 5 proc``, clear_refs)."""
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")


def _status_bytes(name: str) -> int:
    """An entry of /proc/self/status, which is in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
