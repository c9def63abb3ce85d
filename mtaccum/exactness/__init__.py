"""Exactness: whether a step's gradient is that of the joint backward, on any model and real batches."""

from mtaccum.exactness.check import check_exactness
from mtaccum.exactness.report import ExactnessReport, Finding

__all__ = ["ExactnessReport", "Finding", "check_exactness"]
