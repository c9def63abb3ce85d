"""How often a step makes the host wait for the card, and where: by PyTorch's synchronisation debug mode.

A step reads no values of tensors while it runs, so that the number must not grow with the micro-batches.
PyTorch warns of most synchronising calls, not of all: copies from pageable host memory wait too, and are seen
in the times of ``copies``. Beside it, on any device: operations that hand a tensor's values to Python.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from gpu_setting import Setting
from gpu_subjects import Trained, Way, dense_subject, sgd
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Synchronisations", "ValueReads", "synchronisations"]

_SAID = "synchronizing CUDA operation"
_NOT_PLACES = (Path(__file__).name, "warnings.py", "_py_warnings.py")
_UNCOUNTED = 3
_PACKAGE = "mtaccum"
_READS = {
    *("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"),
    *("aten.equal.default", "aten.is_nonzero.default", "aten._unique2.default"),
}


def synchronisations(setting: Setting) -> Iterator[dict[str, Any]]:
    """A row for each way and place of the batch, in one and in four micro-batches."""
    trained = Trained(dense_subject(setting), setting, sgd)
    kinds = [
        Way(),
        Way("sequential"),
        Way("summed"),
        Way(recompute=trained.subject.segments),
        Way(precision="fp16"),
    ]
    places = ["device", "host", "pinned"] if setting.cuda else ["device"]
    for kind in kinds:
        for where in places if kind == kinds[0] else places[:1]:
            for micro_batches in (1, 4):
                way = Way(kind.schedule, micro_batches, kind.recompute, kind.precision)
                yield {"way": str(kind), "accumulate": micro_batches, "batch": where} | _counted(
                    trained.step(way, where), setting
                )


def _counted(step: Callable[[], object], setting: Setting) -> dict[str, Any]:
    """Of one step, after some that aren't counted: a scaler's first ones may overflow."""
    for _ in range(_UNCOUNTED):
        step()
    setting.wait()
    with Synchronisations(setting.cuda) as waits:
        step()
    with ValueReads(torch.device(setting.device).type) as reads:
        step()
    return {
        "synchronisations": sum(waits.places.values()) if setting.cuda else None,
        "places": dict(waits.places.most_common()),
        "reads": sum(reads.places.values()),
        "reads_at": dict(reads.places.most_common()),
    }


class Synchronisations:
    """Counts PyTorch's warnings of synchronising calls, by the innermost line of this project.

    Attributes:
        places: calls by place.
    """

    def __init__(self, cuda: bool) -> None:
        self.places: Counter[str] = Counter()
        self._cuda = cuda
        self._catching = warnings.catch_warnings()

    def __enter__(self) -> Self:
        if self._cuda:
            torch.cuda.set_sync_debug_mode("warn")
        self._catching.__enter__()
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", f".*{_SAID}")
        warnings.showwarning = self._seen
        return self

    def __exit__(self, *raised: Any) -> None:
        self._catching.__exit__(*raised)
        if self._cuda:
            torch.cuda.set_sync_debug_mode("default")

    def _seen(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if _SAID in str(message):
            self.places[_place()] += 1


class ValueReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations after which Python knows values of tensors on a type of device, by place."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: Counter[str] = Counter()
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in _READS and args[0].device.type == self._device_type:
            self.places[_place()] += 1
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """The innermost line on the stack that belongs to the package; else the innermost at all."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename).name not in _NOT_PLACES]
    own = [frame for frame in frames if _PACKAGE in Path(frame.filename).parts]
    frame = (own or frames)[-1]
    parts = Path(frame.filename).parts
    start = len(parts) - 1 - parts[::-1].index(_PACKAGE) if own else len(parts) - 2
    return f"{'/'.join(parts[start:])}:{frame.lineno}"
