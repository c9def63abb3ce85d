"""Budgets: how much memory there is on a device, and how much of it is left for tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtaccum.errors import ConfigError
from mtaccum.memory import format_bytes, parse_bytes

# Of a CUDA card: what the driver's context and the libraries' workspaces take, and by how much the
# allocator's reservations exceed the tensors. Assumed, not measured on a card so far.
_CONTEXT_BYTES, _FRAGMENTATION = 768 * 2**20, 0.05
_CPU_RESERVE = 0.10  # of what is free: kernels' temporaries, the allocator, and the data loader


@dataclass(frozen=True)
class Budget:
    """How many bytes a step may take.

    Attributes:
        total_bytes: as given, or what is free on the device.
        reserve_bytes: of these, what isn't for tensors.
        device: ``cpu`` or ``cuda``.
        absent: whether it is for a CUDA card that isn't there.
        given: whether a user gave it.
    """

    total_bytes: int
    reserve_bytes: int
    device: str
    absent: bool = False
    given: bool = True

    @property
    def tensor_bytes(self) -> int:
        """What tensors may take at the peak."""
        return self.total_bytes - self.reserve_bytes

    def __str__(self) -> str:
        what = "" if self.given else ", which is what is free"
        text = f"budget {format_bytes(self.total_bytes)} on {self.device}{what}"
        if self.reserve_bytes:
            rest = "context, workspaces and fragmentation" if self.device == "cuda" else "all else"
            reserve = f"{format_bytes(self.reserve_bytes)} in reserve for {rest}"
            text += f"; {format_bytes(self.tensor_bytes)} of it for tensors, {reserve}"
        return text


def budget_of(given: Any, device: torch.device | str) -> Budget:
    """The budget on a device.

    Args:
        given: bytes, or a text such as ``6GiB``; None: what is free on the device.

    Raises:
        ConfigError: no amount of memory, more than the device has, or no device to ask.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"memory can be planned for cpu and cuda, not for {device!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"memory can be planned for cpu and cuda, not for {device.type}.")
    absent = device.type == "cuda" and not torch.cuda.is_available()
    if given is None:
        if absent:
            raise ConfigError("memory.budget is needed for a CUDA card that isn't there, such as 24GiB.")
        total = free_bytes(device)
    else:
        total = parse_bytes("memory.budget", given)
        if not absent and total > (there := device_bytes(device)):
            raise ConfigError(
                f"memory.budget: {given!r} is more than {device.type} has, {format_bytes(there)}. Valid is "
                f"up to that; without a budget it is what is free."
            )
    if device.type == "cuda":
        reserve = _CONTEXT_BYTES + int(_FRAGMENTATION * total)
    else:
        reserve = 0 if given is not None else int(_CPU_RESERVE * total)
    if total <= reserve:
        raise ConfigError(
            f"memory.budget: {format_bytes(total)} leaves nothing for tensors, since {format_bytes(reserve)} "
            f"is for context, workspaces and fragmentation."
        )
    return Budget(total, reserve, device.type, absent, given is not None)


def device_bytes(device: torch.device) -> int:
    """All memory of a device; of the CPU what the machine, or the container, has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit())


def free_bytes(device: torch.device) -> int:
    """Memory that a device could still hand out."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):  # not Linux
        available = device_bytes(device)
    return min(available, device_bytes(device))


def _container_limit() -> int:
    """The limit of a control group, as containers have one; without one more than there can be."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return 2**62
