"""Several ranks: the processes that train together, and how their gradients become one."""

from mtaccum.parallel.ddp import Reducer, reduce_gradients
from mtaccum.parallel.fsdp import gathered, is_sharded, is_spread, local, shard, spread_like, whole
from mtaccum.parallel.launch import by_torchrun, joined, launched
from mtaccum.parallel.ranks import ALONE, Ranks, current_ranks, in_step

__all__ = [
    "ALONE",
    "Ranks",
    "Reducer",
    "by_torchrun",
    "current_ranks",
    "gathered",
    "in_step",
    "is_sharded",
    "is_spread",
    "joined",
    "launched",
    "local",
    "reduce_gradients",
    "shard",
    "spread_like",
    "whole",
]
