"""Batches as loaders make them: finding a field, counting and splitting samples, moving to a device.

The lists of them between two optimizer steps are windows.
"""

from mtaccum.batch.fields import (
    Field,
    Inputs,
    Path,
    SeveralInputs,
    call,
    check_field,
    field_of_config,
    get_field,
    is_written_path,
    path,
)
from mtaccum.batch.moving import to_device
from mtaccum.batch.rows import register_split
from mtaccum.batch.samples import batch_size_of, split_batch, split_sizes, take_micro_batch, take_samples
from mtaccum.batch.views import own_view
from mtaccum.batch.windows import windows

__all__ = [
    "Field",
    "Inputs",
    "Path",
    "SeveralInputs",
    "batch_size_of",
    "call",
    "check_field",
    "field_of_config",
    "get_field",
    "is_written_path",
    "own_view",
    "path",
    "register_split",
    "split_batch",
    "split_sizes",
    "take_micro_batch",
    "take_samples",
    "to_device",
    "windows",
]
