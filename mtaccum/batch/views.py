"""Views: the same tensors of a batch in containers of one's own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from torch import Tensor

from mtaccum.batch.rows import rows_of
from mtaccum.structure import hides_tensors, unpacker


def own_view(batch: Any) -> Any:
    """The same tensors in new containers, so that whoever gets them may pop, replace or move entries of its
    own. What can't be taken apart is copied by ``copy.copy``, which leaves its tensors as they are."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch
    handler = unpacker(batch)
    if rows_of(batch) is not None or (handler is None and hides_tensors(batch)):
        return copy.copy(batch)
    if handler is None:
        return batch
    unpack, pack = handler
    return pack(batch, [own_view(member) for member in unpack(batch)])
