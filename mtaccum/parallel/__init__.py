"""Several ranks: the processes that train together, and how their gradients become one."""

from mtaccum.parallel.collectives import Collectives, current_ranks, in_process_group, in_step
from mtaccum.parallel.ddp import DDP, reduce_gradients, wrapper_of
from mtaccum.parallel.dtensor import distribute_like, full_tensor, is_dtensor, to_local
from mtaccum.parallel.fsdp import FSDP
from mtaccum.parallel.kinds import KINDS, ranks_for
from mtaccum.parallel.launch import by_torchrun, joined, launched
from mtaccum.parallel.ranks import Agreement, Ranks
from mtaccum.parallel.sharding import is_sharded, shard, unsharded
from mtaccum.parallel.single import SingleProcess

__all__ = [
    "DDP",
    "FSDP",
    "KINDS",
    "Agreement",
    "Collectives",
    "Ranks",
    "SingleProcess",
    "by_torchrun",
    "current_ranks",
    "distribute_like",
    "full_tensor",
    "in_process_group",
    "in_step",
    "is_dtensor",
    "is_sharded",
    "joined",
    "launched",
    "ranks_for",
    "reduce_gradients",
    "shard",
    "to_local",
    "unsharded",
    "wrapper_of",
]
