"""Times of steps on a card, as ratios: today's table, 16 bits, recompute, compiled nodes."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import step_time
import torch
from common import interleaved_times, ratio_of
from engine_steps import BASELINE, WAYS
from gpu_setting import NotHere, Setting
from gpu_subjects import Trained, Way, attention_subject, dense_subject

__all__ = ["compare", "compiled", "precision", "recompute", "step_times"]

_ROUNDS, _PAIRS = 20, 15


def step_times(setting: Setting) -> Iterator[dict[str, Any]]:
    """The table of ``step_time.py``, and whole steps of a model that fills a card."""
    trained = Trained(dense_subject(setting), setting)
    yield from compare(trained, trained.subject.ways(), setting)
    pairs = setting.rounds(_PAIRS)
    options = argparse.Namespace(device=setting.device, pairs=pairs, quick=setting.quick)
    for row in step_time.measure_all(options):
        yield {"table": "pairs", **row}


def precision(setting: Setting) -> Iterator[dict[str, Any]]:
    """Steps in 16 bits over those in 32; what that does to the gradient's norm, and to the memory."""
    for subject in (dense_subject(setting), attention_subject(setting)):
        kinds = [kind for kind in ("fp32", "bf16", "fp16") if kind != "bf16" or _has_bf16(setting)]
        ways = [Way(precision=kind) for kind in kinds]
        norms = [_first_norm(Trained(subject, setting), way) for way in ways]
        trained = Trained(subject, setting)
        for row, way, norm in zip(compare(trained, ways, setting), ways, norms, strict=True):
            over = None if norm is None or norms[0] is None else norm / norms[0]
            yield {**row, "norm_over_fp32": over, **trained.peaks(way)}


def _first_norm(trained: Trained, way: Way) -> float | None:
    """Of the gradient of the first step, from the same weights and random numbers; None if it overflows."""
    torch.manual_seed(0)
    norm = trained.step(way)().grad_norm
    return None if norm is None else float(norm)


def recompute(setting: Setting) -> Iterator[dict[str, Any]]:
    """As the second table of ``peak_memory.py``: segments of the trunk recomputed, and micro-batches."""
    trained = Trained(dense_subject(setting), setting)
    names = [BASELINE, "segments, K=4"] if setting.quick else [*WAYS]
    samples = len(trained.subject.batch["image"])
    ways = [
        Way(accumulate=min(k, samples), recompute=segments) for segments, k in map(WAYS.__getitem__, names)
    ]
    for way, row in zip(ways, compare(trained, ways, setting), strict=True):
        yield {**row, **trained.peaks(way)}


def compiled(setting: Setting) -> Iterator[dict[str, Any]]:
    """Compiled nodes: the first step, and later ones over those without; eagerly traced where it is quick."""
    options: Any = {"backend": "eager"} if setting.quick else True
    for way in (Way(), Way(precision="bf16")):
        if way.precision == "bf16" and (setting.quick or not _has_bf16(setting)):
            continue
        trained = Trained(dense_subject(setting, heads=2), setting)  # each head is compiled
        fast = Way(precision=way.precision, compile=options)
        started = time.perf_counter()
        try:
            trained.step(fast)()
        except Exception as error:
            if "compiler" not in str(error).lower() and "triton" not in str(error).lower():
                raise
            raise NotHere(f"torch.compile lacks something here: {str(error).splitlines()[0]}") from error
        setting.wait()
        first_s = time.perf_counter() - started
        for row in compare(trained, [way, fast], setting):
            yield {**row, "first_step_s": first_s}


def compare(
    trained: Trained, ways: Sequence[Way], setting: Setting, rounds: int = _ROUNDS
) -> Iterator[dict[str, Any]]:
    """A row for each way: its step's time over that of the first one."""
    steps = {str(way): trained.step(way) for way in ways}
    times = interleaved_times(steps, setting.rounds(rounds), setting.device, warmups=2)
    baseline = times[str(ways[0])]
    for way in ways:
        taken = times[str(way)]
        yield {
            "table": "steps",
            "model": trained.subject.title,
            "way": str(way),
            "over": str(ways[0]),
            "ratio": asdict(ratio_of(taken, baseline)),
            "median_s": statistics.median(taken),
            "times_s": taken,
        }


def _has_bf16(setting: Setting) -> bool:
    return not setting.cuda or torch.cuda.is_bf16_supported()
