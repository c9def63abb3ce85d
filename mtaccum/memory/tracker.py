"""LiveBytes: the bytes of live tensors, op by op, by what they are and by what was going on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from mtaccum.memory.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    KINDS,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
    storages_of,
)
from mtaccum.observe import OperationObserver
from mtaccum.torch_internals import address_of, graph_task

Existing = Iterable[Tensor | nn.Module]

# Hands a tensor built outside the dispatcher (``torch.tensor([1.0])``) to the program: the storage
# is new, though it is the op's input.
_LIFT = torch.ops.aten.lift_fresh.default
_COPY = torch.ops.aten._to_copy.default
_DEVICE = torch.ops.prim.device.default  # no operation: how PyTorch asks a fake tensor where it is


class Moment(NamedTuple):
    """One op of a timeline.

    Attributes:
        op: its name, as PyTorch's dispatcher has it.
        live_bytes: alive as it returned, its inputs included.
        stage: what was going on: ``trunk forward``; "" between stages.
        by_kind: the same bytes in the order of ``KINDS``.
    """

    op: str
    live_bytes: int
    stage: str
    by_kind: tuple[int, ...]


class LiveBytes(OperationObserver):  # type: ignore[no-untyped-call]
    """Follows the bytes of live tensor storages on one type of device while it is entered.

    A storage counts from the op that returns it first until its last reference goes, whoever
    holds that: a Python name, a view, or autograd's saved tensors. Views and in-place ops add
    nothing. A storage resized by an op on it is counted at its new size from that op on.

    Not counted: tensors that existed before and are not in ``existing``; storages made without an op
    (by ``copy.deepcopy``, unpickling, ``torch.frombuffer``); temporaries that a kernel allocates and
    frees inside one op (convolution workspaces, for instance); ops run by other threads; tensors on
    other types of device.

    While any dispatch mode is active, autograd adds the gradients that meet at one tensor out of
    place, where it may otherwise add in place: there the count is above an unobserved run's by
    up to one gradient of that tensor.

    What a storage is, is not known when it is made: it is one of the ``temporaries`` until ``label``
    says more. ``labelling`` does that for a step of an engine.

    Args:
        existing: what is alive already and shall count: tensors of any shape (``inputs``), and modules,
            each standing for its parameters, their gradients, and its buffers. Shared storages count
            once. No reference is kept to any of them, so their deaths are followed as well.
        device: the type of device whose tensors count: ``cpu``, ``cuda``.
        timeline: whether to record :attr:`timeline`.

    An object serves for one ``with`` block, after which its numbers stay as they were at the end.
    Different objects may be nested: each counts what is created inside its own block.

    Attributes:
        ledger: the books, for those who look at single storages.
        stage: what is going on, for the timeline and the peak; to be set by whoever knows.
        peak_stage: what was going on at the peak.

    Raises:
        RuntimeError: on entering an object for the second time.
        TypeError: if ``existing`` has something other than tensors and modules.
        MeasureError: on a sparse layout other than COO, or a subclass wrapping tensors.
    """

    def __init__(
        self, existing: Existing = (), *, device: torch.device | str = "cpu", timeline: bool = False
    ) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._device_type = torch.device(device).type
        self._entered = False
        self._timeline: list[Moment] | None = [] if timeline else None
        self.stage = self.peak_stage = ""
        for tensor, kind in _existing_tensors(existing):
            for storage in storages_of(tensor, self._device_type):
                self.ledger.count(storage, kind)
        self.reset_peak()

    @property
    def current_bytes(self) -> int:
        """Bytes live now; after the block, bytes that were live at its end."""
        return self.ledger.current

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once since the start, or since the last :meth:`reset_peak`."""
        return self.ledger.peak

    @property
    def current_by_kind(self) -> dict[str, int]:
        """Bytes live now, by kind."""
        return dict(zip(KINDS, self.ledger.by_kind, strict=True))

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What the peak consisted of, in bytes by kind."""
        return dict(zip(KINDS, self.ledger.peak_by_kind, strict=True))

    @property
    def timeline(self) -> list[Moment]:
        """The ops in order.

        Raises RuntimeError unless the object was made with ``timeline=True``.
        """
        if self._timeline is None:
            raise RuntimeError("no timeline was recorded: use LiveBytes(timeline=True)")
        return self._timeline

    def reset_peak(self) -> None:
        """Makes the bytes live now the peak."""
        self.ledger.peak = -1
        self.ledger.note_peak()
        self.peak_stage = self.stage

    def label(self, values: object, kind: int) -> None:
        """Say what counted tensors in nested containers are, unless they are something stronger already
        (earlier in ``KINDS``)."""
        for storage in storages_of(values, self._device_type):
            self.ledger.label(storage, kind)

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a LiveBytes object can be entered once only: make a new one")
        self._entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        # Births are seen no longer, so deaths must not be: without the references, no callbacks.
        self.ledger.refs.clear()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op and count what it makes."""
        if func is _DEVICE:
            return func(*args)
        # The storage objects are held across the op, not just their addresses: where the op frees
        # an input's storage, a new one at the same address would otherwise pass for an input.
        inputs = storages_of((args, kwargs), self._device_type)
        result = func(*args, **kwargs)
        ledger = self.ledger
        # An input that is not counted was there before the block: it stays uncounted, also when
        # the op returns it again (a view, or an in-place op).
        foreign = {address_of(s) for s in inputs if not ledger.refresh(s) and func is not _LIFT}
        outputs = [s for s in storages_of(result, self._device_type) if address_of(s) not in foreign]
        if outputs:
            kind = self._kind_of_new(func, inputs)
            for storage in outputs:
                ledger.count(storage, kind)
        # Between ops bytes can only go down, so this is the only place that can set a peak.
        if ledger.note_peak():
            self.peak_stage = self.stage
        self.counted(func, args, kwargs, result)
        if self._timeline is not None:
            self._timeline.append(Moment(str(func), ledger.current, self.stage, tuple(ledger.by_kind)))
        return result

    def counted(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Called after each op, for subclasses."""

    def _kind_of_new(self, func: Any, inputs: list[torch.UntypedStorage]) -> int:
        # graph mode within a backward: a recomputed segment runs again, and keeps what it makes for a while
        if graph_task() != -1:
            return ACTIVATIONS if torch.is_grad_enabled() else TEMPORARIES
        if func is _COPY and not inputs and not self.stage:
            return INPUTS  # a micro-batch on its way to the device
        return TEMPORARIES


def _existing_tensors(existing: Existing) -> Iterator[tuple[Tensor, int]]:
    for item in existing:
        if isinstance(item, nn.Module):
            for tensor in (*item.buffers(), *item.parameters()):
                yield tensor, PARAMETERS
                if tensor.is_leaf and tensor.grad is not None:
                    yield tensor.grad, GRADIENTS
    for item in existing:
        if isinstance(item, Tensor):
            yield item, INPUTS
        elif not isinstance(item, nn.Module):
            raise TypeError(f"existing takes tensors and modules, not {type(item).__name__}")
