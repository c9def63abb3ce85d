"""Peak memory of a piece of code or of an engine's step, in bytes, with a word on how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtaccum.engine import Engine, StepResult
from mtaccum.memory.labels import labelling, state_tensors
from mtaccum.memory.ledger import OPTIMIZER
from mtaccum.memory.refusals import measurable
from mtaccum.memory.tracker import Existing, LiveBytes, Moment
from mtaccum.structure import tensors_of

LIVE, ALLOCATOR = "live tensor bytes", "CUDA allocator peak"


@dataclass(frozen=True)
class PeakReport:
    """Peak memory of a step, the bytes alive at its start included, and how it was measured.

    Attributes:
        peak_bytes: by ``method``.
        start_bytes: alive at the start.
        method: ``live tensor bytes`` or ``CUDA allocator peak``.
        stage: what was going on at the peak: ``trunk backward``; "" if that isn't known.
        by_kind: live tensor bytes at their peak by kind; empty if that isn't known.
        allocated_bytes: peak of the CUDA allocator; None on other devices.
        reserved_bytes: what the CUDA allocator had reserved beyond that; None on other devices.
        timeline: the ops of the step, if asked for.
    """

    peak_bytes: int
    start_bytes: int
    method: str
    stage: str = ""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    timeline: Sequence[Moment] = ()

    @property
    def activation_bytes(self) -> int:
        """Bytes by which the peak exceeds the start."""
        return self.peak_bytes - self.start_bytes


def measure_peak(
    step: Callable[[], object], *, device: torch.device | str = "cpu", existing: Existing = ()
) -> PeakReport:
    """Runs ``step()`` once and reports its peak memory in bytes.

    On the CPU the method is "live tensor bytes", by :class:`LiveBytes`: the start is the size of
    ``existing``; temporaries inside kernels are not seen. On CUDA it is "CUDA allocator
    peak": the start is all that the device's allocator has handed out, so ``existing`` plays no
    part, and kernels' temporaries and rounding count. The device's peak statistics are reset.

    Gradients that the step creates, rather than adds to, count as its own memory: to have them
    counted at the start, make them first (run the step once) and put the model in ``existing``.

    Raises ValueError for other devices, and RuntimeError for CUDA where there is none.
    """
    device = _check_device(device)
    if device.type == "cpu":
        with LiveBytes(existing) as live:
            start = live.current_bytes
            step()
        return PeakReport(live.peak_bytes, start, LIVE)
    start = _reset(device)
    step()
    allocated, reserved = _allocator(device)
    return PeakReport(allocated, start, ALLOCATOR, allocated_bytes=allocated, reserved_bytes=reserved)


def measure_step(
    engine: Engine, window: Sequence[Any], *, existing: Existing = (), timeline: bool = False
) -> tuple[StepResult, PeakReport]:
    """One real step of an engine, measured by what its memory consists of and when it peaks.

    On CUDA live tensor bytes and the allocator's numbers are both given; ``peak_bytes`` is the allocator's.
    The tracker slows every op: time other steps.

    Args:
        window: as for ``Engine.step``. Its tensors count where they are on the engine's device.
        existing: modules and tensors besides model, optimizer state and window, such as averaged weights.
        timeline: whether to keep one entry per op.

    Returns:
        What the step returned, and its report.

    Raises:
        ValueError: an engine on another device than CPU or CUDA.
        MeasureError: a step that runs, but not while it is measured. Nothing was changed.
    """
    model, optimizers = engine.model, engine.optimizers.all
    device = _check_device(model.device)
    state = [tensor for optimizer in optimizers for tensor in state_tensors(optimizer)]
    alive: list[Tensor | nn.Module] = [model, *existing, *state, *tensors_of(window, strict=False)]
    allocator_start = _reset(device) if device.type == "cuda" else 0
    live = LiveBytes(alive, device=device, timeline=timeline)
    live.label(state, OPTIMIZER)
    live.reset_peak()
    start = live.current_bytes
    with measurable(), live, labelling(live, model, *optimizers):
        result = engine.step(window) if optimizers else engine.accumulate(window)
    moments = live.timeline if timeline else ()
    report = PeakReport(live.peak_bytes, start, LIVE, live.peak_stage, live.peak_by_kind, timeline=moments)
    if device.type == "cuda":
        allocated, reserved = _allocator(device)
        report = replace(
            report,
            peak_bytes=allocated,
            start_bytes=allocator_start,
            method=ALLOCATOR,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
        )
    return result, report


def _check_device(name: torch.device | str) -> torch.device:
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"peak memory can be measured on cpu and cuda, not on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is available")
    return device


def _reset(device: torch.device) -> int:
    """Resets the allocator's peak; returns the bytes that it has handed out."""
    # The allocator keeps its books at the time of the calls, so no kernel need be waited for.
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _allocator(device: torch.device) -> tuple[int, int]:
    """Peak of the bytes handed out, and by how much more was reserved at most."""
    allocated = torch.cuda.max_memory_allocated(device)
    return allocated, torch.cuda.max_memory_reserved(device) - allocated
