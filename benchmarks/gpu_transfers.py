"""What goes between host and card: saved activations that are kept on the host, and batches on their way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from common import interleaved_times, ratio_of
from gpu_setting import Setting
from gpu_subjects import Trained, Way, dense_subject
from gpu_times import compare
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Transfers", "copies", "offload"]

_COPIES = ("aten.copy_.default", "aten._to_copy.default")
_BLOCK_BYTES, _QUICK_BYTES = 2**28, 2**20
_ROUNDS = 10


def offload(setting: Setting) -> Iterator[dict[str, Any]]:
    """Steps with and without ``offload``: memory, time, bytes moved, and what the link does at best.

    The CPU refuses ``offload``, so there a step runs inside of what it consists of.
    """
    trained = Trained(dense_subject(setting), setting)
    ways = [Way(), Way(offload=True)] if setting.cuda else [Way()]
    for way, row in zip(ways, compare(trained, ways, setting, _ROUNDS), strict=True):
        around: AbstractContextManager[Any] = nullcontext() if setting.cuda else save_on_cpu()
        step = trained.step(way)  # before: its batch goes to the device
        with around, Transfers(torch.device(setting.device).type) as moved:
            step()
        row |= {"to_host_bytes": moved.to_host_bytes, "to_device_bytes": moved.to_device_bytes}
        yield {**row, **trained.peaks(way)}
    yield from _link(setting)


def copies(setting: Setting) -> Iterator[dict[str, Any]]:
    """Steps whose batch lies on the device, in pinned and in pageable memory of the host; and the link."""
    trained = Trained(dense_subject(setting), setting)
    places = ["device", "pinned", "host"] if setting.cuda else ["device", "host"]
    for way in (Way(), Way(accumulate=4)):
        steps = {where: trained.step(way, where) for where in places}
        times = interleaved_times(steps, setting.rounds(2 * _ROUNDS), setting.device, warmups=2)
        for where in places:
            yield _over({"table": "steps", "way": str(way), "batch": where}, times, where, "device")
    yield from _link(setting)


def _over(row: dict[str, Any], times: Mapping[str, list[float]], name: str, baseline: str) -> dict[str, Any]:
    ratio = asdict(ratio_of(times[name], times[baseline]))
    return {**row, "ratio": ratio, "median_s": statistics.median(times[name]), "times_s": times[name]}


def _link(setting: Setting) -> Iterator[dict[str, Any]]:
    """Bandwidth of large copies in each direction; on the CPU within its memory."""
    size = _QUICK_BYTES if setting.quick else _BLOCK_BYTES
    there = torch.ones(size, dtype=torch.uint8, device=setting.device)
    kinds = {"pageable": torch.ones(size, dtype=torch.uint8)}
    if setting.cuda:
        kinds["pinned"] = kinds["pageable"].pin_memory()
    steps = {}
    for kind, here in kinds.items():
        steps[f"to the device, {kind}"] = partial(there.copy_, here, non_blocking=True)
        steps[f"to the host, {kind}"] = partial(here.copy_, there, non_blocking=True)
    times = interleaved_times(steps, setting.rounds(_ROUNDS), setting.device, warmups=2)
    for name, taken in times.items():
        yield {"table": "link", "copy": name, "bytes": size, "bytes_per_s": size / statistics.median(taken)}


class Transfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations copy from a type of device to the host and back.

    Attributes:
        to_host_bytes, to_device_bytes: so far.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.to_host_bytes = self.to_device_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) in _COPIES:
            source: Tensor = args[1] if str(func) == _COPIES[0] else args[0]
            if source.device.type != result.device.type:
                moved = result.numel() * result.element_size()
                if result.device.type == self._device_type:
                    self.to_device_bytes += moved
                else:
                    self.to_host_bytes += moved
        return result
