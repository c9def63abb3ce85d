"""The books of live storages: how many bytes of which kind are alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from mtaccum.errors import MeasureError
from mtaccum.parallel import to_local
from mtaccum.torch_internals import address_of, is_wrapper

PARAMETERS, GRADIENTS, OPTIMIZER, INPUTS, FEATURES, ACTIVATIONS, TEMPORARIES = range(7)

KINDS = (
    "parameters",  # buffers included
    "gradients",
    "optimizer state",
    "inputs",  # and labels
    "features",  # at a cut, with their gradients
    "activations",  # kept for a backward
    "temporaries",  # all others
)
"""What the memory of a step consists of."""


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a counted storage, with its address, its counted size in bytes and its kind; and a
    note of whoever looks on."""

    __slots__ = ("key", "kind", "nbytes", "note")
    key: int
    nbytes: int
    kind: int
    note: Any


class Ledger:
    """The counted storages and their sums.

    Keyed by the address of the C++ storage. An address may be used again, but not before the
    entry is gone: once made, a storage's Python object lives as long as the C++ storage, even
    if no Python name is left, and owns a reference to it. So the weak reference dies exactly
    when the last C++ reference goes, just before the memory is released. The ledger owns the
    weak references, and they know it only weakly: neither it nor a storage keeps the other.

    Attributes:
        current: bytes alive now.
        peak: most bytes alive so far.
        by_kind: bytes alive now, in the order of ``KINDS``.
        peak_by_kind: the same at the peak.
        refs: the counted storages by address.
    """

    def __init__(self) -> None:
        self.current = self.peak = 0
        self.by_kind = [0] * len(KINDS)
        self.peak_by_kind = tuple(self.by_kind)
        self.refs: dict[int, StorageRef] = {}
        this = weakref.ref(self)

        def drop(ref: weakref.ref[torch.UntypedStorage]) -> None:
            ledger = this()
            if ledger is not None and isinstance(ref, StorageRef):
                del ledger.refs[ref.key]
                ledger.current -= ref.nbytes
                ledger.by_kind[ref.kind] -= ref.nbytes

        self._drop = drop

    def count(self, storage: torch.UntypedStorage, kind: int) -> None:
        """Counts ``storage`` at its present size, once however often it is given; the first kind stays."""
        if self.refresh(storage):
            return
        ref = StorageRef(storage, self._drop)
        ref.key, ref.nbytes, ref.kind, ref.note = address_of(storage), storage.nbytes(), kind, None
        # A storage of no bytes is entered too: it may be an ``out=`` argument, yet to grow.
        self.refs[ref.key] = ref
        self.current += ref.nbytes
        self.by_kind[kind] += ref.nbytes

    def refresh(self, storage: torch.UntypedStorage) -> bool:
        """Follows a resize of ``storage``; returns whether it is counted at all."""
        if (ref := self.refs.get(address_of(storage))) is None:
            return False
        # No call within the update of a sum: garbage collected there could cause a drop, and
        # its subtraction would be lost.
        growth = storage.nbytes() - ref.nbytes
        self.current += growth
        self.by_kind[ref.kind] += growth
        ref.nbytes += growth
        return True

    def label(self, storage: torch.UntypedStorage, kind: int) -> None:
        """Makes a counted storage one of ``kind``, if its own kind is a weaker one (later in ``KINDS``; the
        optimizer's state stands among the inputs before it is labelled)."""
        if (ref := self.refs.get(address_of(storage))) is not None and kind < ref.kind:
            nbytes = ref.nbytes
            self.by_kind[ref.kind] -= nbytes
            self.by_kind[kind] += nbytes
            ref.kind = kind

    def note_peak(self) -> bool:
        """Makes the bytes alive now the peak if there are more than ever; returns whether there are."""
        if self.current <= self.peak:
            return False
        self.peak = self.current
        self.peak_by_kind = tuple(self.by_kind)
        return True


def storages_of(values: object, device_type: str = "cpu") -> list[torch.UntypedStorage]:
    """The storages on a type of device of all tensors (and bare storages) in nested containers.

    A fake tensor is where it says it is.
    """
    found: list[torch.UntypedStorage] = []
    _collect(values, device_type, found)
    return found


def _collect(value: object, device_type: str, found: list[torch.UntypedStorage]) -> None:
    # by hand, since it runs for each op, and PyTorch's pytree takes several times as long
    if isinstance(value, Tensor):
        if value.device.type == device_type:
            found.extend(_own_storages(value))
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, device_type, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, device_type, found)
    elif isinstance(value, torch.UntypedStorage) and value.device.type == device_type:
        found.append(value)


def _own_storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    tensor = to_local(tensor)  # of a DTensor this rank's shard
    wrapper = bool(is_wrapper(tensor))
    if tensor.layout == torch.strided and not wrapper:
        return [tensor.untyped_storage()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    kind = f"{type(tensor).__name__} of layout {tensor.layout}"
    raise MeasureError(f"the memory of a {kind} can't be measured")
