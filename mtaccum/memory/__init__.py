"""Memory: live tensor bytes of a step, measured for real or predicted on fake tensors."""

from mtaccum.memory.ledger import KINDS
from mtaccum.memory.measure import PeakReport, measure_peak, measure_step
from mtaccum.memory.predict import FakeTraining, Prediction
from mtaccum.memory.tracker import LiveBytes, Moment
from mtaccum.memory.units import format_bytes, parse_bytes

__all__ = [
    "KINDS",
    "FakeTraining",
    "LiveBytes",
    "Moment",
    "PeakReport",
    "Prediction",
    "format_bytes",
    "measure_peak",
    "measure_step",
    "parse_bytes",
]
