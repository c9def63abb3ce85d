"""The model: a tree of the user's modules, and built-in trunks and heads."""

from mtaccum.model.heads import DenseHead, PooledHead
from mtaccum.model.paths import ROOT, TRUNK
from mtaccum.model.tree import MultiTaskModel, Neck, evaluating
from mtaccum.model.trunks import ConvTrunk

__all__ = ["ROOT", "TRUNK", "ConvTrunk", "DenseHead", "MultiTaskModel", "Neck", "PooledHead", "evaluating"]
