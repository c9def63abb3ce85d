"""What a process takes of a card besides its tensors: context, libraries, workspaces, fragmentation.

A process that has the card open already looks at how much of it is used, starts another one, and that one
says after each stage what the card has lost meanwhile. Other programs on the card disturb this. As a script
it is that other process. On the CPU its resident set stands for the card's memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_setting import Setting
from gpu_subjects import Subject, Trained, Way, dense_subject, predictor
from torch import nn

from mtaccum.planning import budget_of

__all__ = ["reserve"]

_STEPS, _QUICK_STEPS = 20, 2


def reserve(setting: Setting) -> Iterator[dict[str, Any]]:
    """A row for each stage; the last one compares what was needed with what is held in reserve by a plan."""
    if setting.cuda:
        torch.zeros(1, device=setting.device)  # so that this process's own context doesn't come in between
    before = setting.used_bytes() if setting.cuda else 0
    arguments = [setting.device, str(int(setting.quick)), str(before)]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    last: dict[str, Any] = {}
    for line in process.stdout:
        last = json.loads(line)
        yield last
    if process.wait():
        raise RuntimeError(f"the process that was measured ended with {process.returncode}")
    subject = dense_subject(setting)
    if subject.title != last["model"]:
        raise RuntimeError(f"memory was free for {subject.title}, then for {last['model']}")
    predict = predictor(subject, "cuda")
    predicted = max(predict(way) for way in _ways())
    needed, assumed = last["used_bytes"] - predicted, _assumed(predicted, setting)
    yield {
        "table": "compared",
        "predicted_bytes": predicted,
        "needed_bytes": needed,
        "assumed_bytes": assumed,
        "used_bytes": last["used_bytes"],
        "needed_over_assumed": None if assumed is None else needed / assumed,
    }


def _ways() -> list[Way]:
    return [Way(), Way(accumulate=4), Way("summed")]


def _assumed(predicted: int, setting: Setting) -> int | None:
    """The reserve of the smallest budget whose rest holds the predicted bytes; it grows with the budget."""
    if not setting.cuda:
        return None
    total = torch.cuda.mem_get_info(setting.device)[1]
    low, high = 0, total
    while high - low > 2**20:
        middle = (low + high) // 2
        try:
            fits = budget_of(middle, "cuda").tensor_bytes >= predicted
        except ValueError:  # nothing is left of it
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    return high - predicted


# --- the process that is measured -------------------------------------------------------------------------


def stages(setting: Setting, subject: Subject) -> Iterator[tuple[str, Callable[[], object]]]:
    """What it does, by name, one after the other."""
    device = setting.device
    yield "context", partial(torch.zeros, 1, device=device)
    matrix = torch.ones(64 if setting.quick else 1024, 64 if setting.quick else 1024, device=device)
    yield "matrix product", lambda: (matrix @ matrix, matrix.half() @ matrix.half())
    layer = nn.Conv2d(8, 8, 3, padding=1).to(device)
    image = torch.ones(2, 8, 32, 32, device=device)
    yield "convolution, forwards and backwards", lambda: layer(image).sum().backward()
    trained = Trained(subject, setting)
    yield "one step", trained.step(Way(), "host")
    steps = _QUICK_STEPS if setting.quick else _STEPS
    for way in _ways():
        yield f"{steps} steps, {way}", partial(_repeat, trained.step(way, "host"), steps)


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def main() -> None:
    """Run the stages; a line of JSON after each."""
    device, quick, before = sys.argv[1:]
    setting = Setting(device, bool(int(quick)), Path())
    subject = dense_subject(setting)  # now, since later less memory is free
    for name, run in stages(setting, subject):
        setting.reset_peaks()
        run()
        setting.wait()
        used = setting.used_bytes() - int(before)
        allocated, reserved = setting.allocator_peaks()
        row = {
            "model": subject.title,
            "stage": name,
            "used_bytes": used,
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
        }
        print(json.dumps({**row, "beside_bytes": used - setting.reserved_bytes()}), flush=True)


if __name__ == "__main__":
    main()
