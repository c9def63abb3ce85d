"""Peak memory of a piece of code, in bytes.

On the CPU the measure is *live tensor bytes*: the sizes of all tensor storages alive at one
moment, followed op by op by :class:`LiveBytes`. On CUDA it is the peak of PyTorch's allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "PeakReport", "measure_peak"]

# Hands a tensor built outside the dispatcher (``torch.tensor([1.0])``) to the program: the storage
# is new, though it is the op's input.
_LIFT = torch.ops.aten.lift_fresh.default
_Existing = Iterable[Tensor | nn.Module]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of live CPU tensor storages while it is entered.

    A storage counts from the op that returns it first until its last reference goes, whoever
    holds that: a Python name, a view, or autograd's saved tensors. Views and in-place ops add
    nothing. A storage resized by an op on it is counted at its new size from that op on.

    Not counted: tensors that existed before and are not in ``existing``; temporaries that a
    kernel allocates and frees inside one op (convolution workspaces, for instance); ops run by
    other threads. CUDA and meta tensors are ignored.

    While any dispatch mode is active, autograd adds the gradients that meet at one tensor out of
    place, where it may otherwise add in place: there the count is above an unobserved run's by
    up to one gradient of that tensor.

    Args:
        existing: what is alive already and shall count: tensors of any shape, and modules, each
            standing for its parameters, their gradients, and its buffers. Shared storages count
            once. No reference is kept to any of them, so their deaths are followed as well.
        timeline: whether to record :attr:`timeline`.

    An object serves for one ``with`` block, after which its numbers stay as they were at the end.
    Different objects may be nested: each counts what is created inside its own block.

    Raises:
        RuntimeError: on entering an object for the second time.
        TypeError: if ``existing`` has something other than tensors and modules.
        NotImplementedError: on a sparse layout other than COO, or a subclass wrapping tensors.
    """

    def __init__(self, existing: _Existing = (), *, timeline: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = _Ledger()
        self._entered = False
        self._timeline: list[tuple[str, int]] | None = [] if timeline else None
        for storage in _storages(list(_existing_tensors(existing))):
            self._ledger.count(storage)
        self.reset_peak()

    @property
    def current_bytes(self) -> int:
        """Bytes live now; after the block, bytes that were live at its end."""
        return self._ledger.current

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once since the start, or since the last :meth:`reset_peak`."""
        return self._ledger.peak

    @property
    def timeline(self) -> list[tuple[str, int]]:
        """The ops in order, each as (name, bytes live as it returned, its inputs included).

        Raises RuntimeError unless the object was made with ``timeline=True``.
        """
        if self._timeline is None:
            raise RuntimeError("no timeline was recorded: use LiveBytes(timeline=True)")
        return self._timeline

    def reset_peak(self) -> None:
        """Makes the bytes live now the peak."""
        self._ledger.peak = self._ledger.current

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a LiveBytes object can be entered once only: make a new one")
        self._entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        # Births are seen no longer, so deaths must not be: without the references, no callbacks.
        self._ledger.refs.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The storage objects are held across the op, not just their addresses: where the op frees
        # an input's storage, a new one at the same address would otherwise pass for an input.
        inputs = list(_storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        ledger = self._ledger
        # An input that is not counted was there before the block: it stays uncounted, also when
        # the op returns it again (a view, or an in-place op).
        foreign = {s._cdata for s in inputs if not ledger.refresh(s) and func is not _LIFT}
        for storage in _storages(result):
            if storage._cdata not in foreign:
                ledger.count(storage)
        # Between ops bytes can only go down, so this is the only place that can set a peak.
        ledger.peak = max(ledger.peak, ledger.current)
        if self._timeline is not None:
            self._timeline.append((str(func), ledger.current))
        return result


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a counted storage, with its address and its counted size in bytes."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class _Ledger:
    """The counted storages and their sum.

    Keyed by the address of the C++ storage. An address may be used again, but not before the
    entry is gone: once made, a storage's Python object lives as long as the C++ storage, even
    if no Python name is left, and owns a reference to it. So the weak reference dies exactly
    when the last C++ reference goes, just before the memory is released. The ledger owns the
    weak references, and they know it only weakly: neither it nor a storage keeps the other.
    """

    def __init__(self) -> None:
        self.current = self.peak = 0
        self.refs: dict[int, _StorageRef] = {}
        this = weakref.ref(self)

        def drop(ref: weakref.ref[torch.UntypedStorage]) -> None:
            ledger = this()
            if ledger is not None and isinstance(ref, _StorageRef):
                del ledger.refs[ref.key]
                ledger.current -= ref.nbytes

        self._drop = drop

    def count(self, storage: torch.UntypedStorage) -> None:
        """Counts ``storage`` at its present size, once however often it is given."""
        if storage.device.type != "cpu" or self.refresh(storage):
            return
        ref = _StorageRef(storage, self._drop)
        ref.key, ref.nbytes = storage._cdata, storage.nbytes()
        # A storage of no bytes is entered too: it may be an ``out=`` argument, yet to grow.
        self.refs[ref.key] = ref
        self.current += ref.nbytes

    def refresh(self, storage: torch.UntypedStorage) -> bool:
        """Follows a resize of ``storage``; returns whether it is counted at all."""
        if (ref := self.refs.get(storage._cdata)) is None:
            return False
        # No call within the update of the sum: garbage collected there could cause a drop, and
        # its subtraction would be lost.
        growth = storage.nbytes() - ref.nbytes
        self.current += growth
        ref.nbytes += growth
        return True


def _storages(values: object) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors (and bare storages) in nested containers."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.UntypedStorage):
            yield leaf
        elif isinstance(leaf, Tensor):
            wrapper = is_traceable_wrapper_subclass(leaf)
            if leaf.layout == torch.strided and not wrapper:
                yield leaf.untyped_storage()
            elif leaf.layout == torch.sparse_coo:
                yield from (leaf._indices().untyped_storage(), leaf._values().untyped_storage())
            else:
                kind = f"{type(leaf).__name__} of layout {leaf.layout}"
                raise NotImplementedError(f"cannot tell the memory of a {kind}")


def _existing_tensors(existing: _Existing) -> Iterator[Tensor]:
    for item in existing:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, nn.Module):
            yield from item.buffers()
            for parameter in item.parameters():
                yield from (parameter,) if parameter.grad is None else (parameter, parameter.grad)
        else:
            raise TypeError(f"existing takes tensors and modules, not {type(item).__name__}")


@dataclass(frozen=True)
class PeakReport:
    """Peak memory of a step, the bytes alive at its start included, and how it was measured."""

    peak_bytes: int
    start_bytes: int
    method: str

    @property
    def activation_bytes(self) -> int:
        """Bytes by which the peak exceeds the start."""
        return self.peak_bytes - self.start_bytes


def measure_peak(
    step: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    existing: _Existing = (),
) -> PeakReport:
    """Runs ``step()`` once and reports its peak memory in bytes.

    On the CPU the method is "live tensor bytes", by :class:`LiveBytes`: the start is the size of
    ``existing``; temporaries inside kernels are not seen. On CUDA it is "CUDA allocator
    peak": the start is all that the device's allocator has handed out, so ``existing`` plays no
    part, and kernels' temporaries and rounding count. The device's peak statistics are reset.

    Gradients that the step creates, rather than adds to, count as its own memory: to have them
    counted at the start, make them first (run the step once) and put the model in ``existing``.

    Raises ValueError for other devices, and RuntimeError for CUDA where there is none.
    """
    device = torch.device(device)
    if device.type == "cpu":
        with LiveBytes(existing) as live:
            start = live.current_bytes
            step()
        return PeakReport(live.peak_bytes, start, "live tensor bytes")
    if device.type != "cuda":
        raise ValueError(f"peak memory can be measured on cpu and cuda, not on {device.type}")
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is available")
    # The allocator keeps its books at the time of the calls, so no kernel need be waited for.
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    step()
    return PeakReport(torch.cuda.max_memory_allocated(device), start, "CUDA allocator peak")
