"""Observe: what runs in a step, told to whoever looks on: stages, modules, operations."""

from mtaccum.observe.modules import any_module_entered, observed
from mtaccum.observe.operations import OperationObserver
from mtaccum.observe.stages import BACKWARD, FORWARD, STEP, StageObserver, announce_cut, observing, stage

__all__ = [
    "BACKWARD",
    "FORWARD",
    "STEP",
    "OperationObserver",
    "StageObserver",
    "announce_cut",
    "any_module_entered",
    "observed",
    "observing",
    "stage",
]
