"""The memory of the step that was measured, as a picture for the loggers that take some."""

from __future__ import annotations

from collections.abc import Sequence

from mtaccum.memory import PeakReport
from mtaccum.training.loggers import Logger


def log_timeline(step: int, title: str, report: PeakReport, loggers: Sequence[Logger]) -> None:
    """Give the loggers that take pictures one named ``memory/step``, if matplotlib is installed.

    Args:
        step: the optimizer step that was measured.
        title: stands above the picture.
    """
    takers = [logger for logger in loggers if hasattr(logger, "log_pictures")]
    if not takers or not report.timeline:
        return
    try:
        import matplotlib  # noqa: F401 (an extra, and slow to import; without it there is no picture)
    except ImportError:
        return
    from mtaccum.memory.picture import draw_timelines, pixels_of

    picture = pixels_of(draw_timelines({title: report.timeline}))
    for logger in takers:
        logger.log_pictures(step, {"memory/step": picture})
