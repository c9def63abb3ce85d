"""What a part of ``gpu.py`` is told, and the few things that differ between a CUDA card and the CPU.

On the CPU each of these has a stand-in, so that whatever runs on a card can be tried without one. PyTorch is
imported where it is used: the command itself says what is missing, and must not miss it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["NotHere", "Setting"]

_STATUS = Path("/proc/self/status")


class NotHere(Exception):  # noqa: N818 (it is no error)
    """A part can't be run on this machine; says why."""


@dataclass(frozen=True)
class Setting:
    """Where and how large.

    Attributes:
        device: ``cuda``, ``cuda:1`` or ``cpu``.
        quick: small models and few rounds: a look at whether it runs.
        folder: for files of this run.
    """

    device: str
    quick: bool
    folder: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA card."""
        return self.device.startswith("cuda")

    def rounds(self, full: int) -> int:
        """Rounds of timing, ``full`` or a few."""
        return 3 if self.quick else full

    def wait(self) -> None:
        """Until the device has done what it was given."""
        import torch

        if self.cuda:
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give back what the allocator keeps beyond the tensors."""
        import torch

        if self.cuda:
            torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        """Of a card what all processes use; of the CPU this process's resident set (0 outside Linux)."""
        import torch

        if self.cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            return int(total - free)
        try:
            lines = _STATUS.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    def free_bytes(self) -> int:
        """What a card could still hand out; of the CPU enough for the models here."""
        import torch

        return int(torch.cuda.mem_get_info(self.device)[0]) if self.cuda else 2**31

    def allocator_peaks(self) -> tuple[int, int]:
        """Most bytes of tensors, and of the allocator's reservations, since the last reset; 0 on the CPU."""
        import torch

        if not self.cuda:
            return 0, 0
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def reserved_bytes(self) -> int:
        """What the allocator has of a card now; 0 on the CPU."""
        import torch

        return torch.cuda.memory_reserved(self.device) if self.cuda else 0

    def reset_peaks(self) -> None:
        """Let the peaks begin anew; there are none before the card is first used."""
        import torch

        if self.cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self.device)
