"""Several ranks: the processes that train together, and how their gradients become one."""

from mtaccum.parallel.ddp import Reducer, reduce_gradients
from mtaccum.parallel.launch import joined, launched
from mtaccum.parallel.ranks import ALONE, Ranks, current_ranks, in_step

__all__ = ["ALONE", "Ranks", "Reducer", "current_ranks", "in_step", "joined", "launched", "reduce_gradients"]
