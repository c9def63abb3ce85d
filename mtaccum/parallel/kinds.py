"""Kinds: which kind of ranks an engine trains with."""

from __future__ import annotations

from mtaccum.errors import ConfigError, unknown_name
from mtaccum.model.tree import MultiTaskModel
from mtaccum.parallel.collectives import current_ranks
from mtaccum.parallel.ddp import DDP
from mtaccum.parallel.fsdp import FSDP
from mtaccum.parallel.ranks import Ranks
from mtaccum.parallel.sharding import is_sharded
from mtaccum.parallel.single import SingleProcess

KINDS: dict[str, type[Ranks]] = {kind.kind: kind for kind in (SingleProcess, DDP, FSDP)}
"""By the name that ``Engine(parallel=...)`` takes."""


def ranks_for(model: MultiTaskModel, parallel: str | Ranks | None, comm_hook: str = "none") -> Ranks:
    """The ranks that a model is trained with.

    Args:
        parallel: the name of a kind, or a kind of one's own; None: what fits.
        comm_hook: as for ``DDP``.

    Raises:
        ConfigError: an unknown name, or a kind that doesn't fit the model.
    """
    if isinstance(parallel, Ranks):
        return parallel
    if parallel is not None and parallel not in tuple(KINDS):
        raise ConfigError(unknown_name("parallel", parallel, KINDS))
    collectives, sharded = current_ranks(), is_sharded(model)
    if parallel == "fsdp" and collectives.world_size > 1 and not sharded:
        raise ConfigError(
            "parallel='fsdp' needs a model that is sharded: call mtaccum.parallel.shard(model) before its "
            "optimizer is made."
        )
    if parallel not in (None, "fsdp") and sharded:
        raise ConfigError(f"the model is sharded over the ranks, so parallel={parallel!r} can't train it.")
    if parallel == "none" or collectives.world_size == 1:
        return SingleProcess(on_purpose=parallel == "none")
    return FSDP(model, collectives) if sharded else DDP(collectives, comm_hook)
