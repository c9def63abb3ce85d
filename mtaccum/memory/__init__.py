"""Memory: live tensor bytes, measured."""

from mtaccum.memory.tracker import LiveBytes, PeakReport, measure_peak

__all__ = ["LiveBytes", "PeakReport", "measure_peak"]
