"""Memory of steps on a card: today's table of the schedules, whole steps, and predictions beside both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases import RECOMPUTED
from gpu_setting import Setting
from gpu_subjects import Subject, Trained, Way, attention_subject, dense_subject, predictor
from peak_memory import BASELINE, measure_memory

from mtaccum.engine import SCHEDULES

__all__ = ["memory", "prediction"]

_HEADS, _QUICK_HEADS = (1, 2, 4, 8), (1, 8)


def memory(setting: Setting) -> Iterator[dict[str, Any]]:
    """Rows of ``passes``, the table of ``peak_memory.py``, and whole ``steps``, by allocator and tracker."""
    for heads in _QUICK_HEADS if setting.quick else _HEADS:
        runs = [(f"dense-{heads}", schedule) for schedule in (*SCHEDULES, RECOMPUTED)]
        rows = measure_memory(runs, setting.device, setting.quick)
        (baseline,) = [row["activation_bytes"] for row in rows if row["schedule"] == BASELINE]
        for row in rows:
            yield {"table": "passes", **row, "over_summed": row["activation_bytes"] / baseline}
    trained = Trained(dense_subject(setting), setting)
    for way in trained.subject.ways():
        yield {"table": "steps", "model": trained.subject.title, "way": str(way), **trained.peaks(way)}


def prediction(setting: Setting) -> Iterator[dict[str, Any]]:
    """Predicted on fake tensors of the CPU, as for a card that isn't there, beside what a step here takes."""
    dense, attention = dense_subject(setting), attention_subject(setting)
    yield from _predicted(dense, "fp32", setting)
    yield from _predicted(attention, "bf16", setting)
    if not setting.quick:
        yield from _predicted(attention, "fp32", setting)
        yield from _predicted(dense, "bf16", setting)


def _predicted(subject: Subject, precision: str, setting: Setting) -> Iterator[dict[str, Any]]:
    kind = "cuda" if setting.cuda else "cpu"
    predict = predictor(subject, kind, precision)
    trained = Trained(subject, setting)
    ways = [Way(way.schedule, way.accumulate, way.recompute, precision) for way in subject.ways()]
    ways = ways[-1:] if setting.quick else ways
    ways += [Way(precision=precision, offload=True)] if setting.cuda else []  # the CPU has no host to go to
    for way in ways:
        predicted, measured = predict(way), trained.peaks(way)
        row = {"model": subject.title, "way": str(way), "predicted_bytes": predicted, **measured}
        row["over_live"] = predicted / measured["live_bytes"]
        for name in ("allocated", "reserved"):
            found = measured[f"{name}_bytes"]
            row[f"over_{name}"] = None if found is None else predicted / found
        yield row
