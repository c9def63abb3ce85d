"""Data: the digit scenes that ship, and the sampler of micro-batches."""

from mtaccum.data.digits import DigitScenes
from mtaccum.data.loading import MicroBatchSampler, batch_errors, loaded

__all__ = ["DigitScenes", "MicroBatchSampler", "batch_errors", "loaded"]
