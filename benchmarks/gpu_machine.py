"""The machine: card, driver, libraries and what they are set to; and whether a first step runs at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import check_device, environment
from gpu_setting import Setting
from gpu_subjects import Trained, Way, small_subject

__all__ = ["machine"]

_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")


def machine(setting: Setting) -> Iterator[dict[str, Any]]:
    """Facts in rows that belong together: what ``common.environment`` says, then more of the card."""
    check_device(setting.device)
    facts = environment(setting.device, [])
    facts["settings"] = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    if setting.cuda:
        facts["versions"] |= _found(_LIBRARIES)
    yield facts
    if setting.cuda:
        yield {"card": _card(setting)}
    step = Trained(small_subject(), setting).step(Way(accumulate=2))
    yield {"first_step_norm": float(step().grad_norm)}


_LIBRARIES: dict[str, Callable[[], Any]] = {
    "cuda": lambda: torch.version.cuda,
    "cudnn": lambda: torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
}


def _card(setting: Setting) -> dict[str, Any]:
    device = setting.device
    properties = torch.cuda.get_device_properties(device)
    return _found(
        {
            "name": lambda: properties.name,
            "cards": torch.cuda.device_count,
            "capability": lambda: f"{properties.major}.{properties.minor}",
            "multiprocessors": lambda: properties.multi_processor_count,
            "total_bytes": lambda: torch.cuda.mem_get_info(device)[1],
            "free_bytes": lambda: torch.cuda.mem_get_info(device)[0],
            "bf16": torch.cuda.is_bf16_supported,
            "tf32_matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
            "tf32_cudnn": lambda: torch.backends.cudnn.allow_tf32,
            "state": _nvidia_smi,
        }
    )


def _found(facts: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each function returns; where it fails, that: no fact is worth the rest."""
    found: dict[str, Any] = {}
    for name, fact in facts.items():
        try:
            found[name] = fact()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _nvidia_smi() -> str | None:
    """Driver, clocks, and memory in use, of all cards; None where the program is missing."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "driver_version,pstate,clocks.sm,clocks.mem,memory.used,memory.total,power.limit"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return done.stdout.strip() or None
