"""What is measured of a peer: its memory, its gradients against those of the loop by hand, and its time."""

from __future__ import annotations

import gc
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Case, build_case
from common import interleaved_times, ratio_of
from peer_steps import BASELINE, PEERS, Step, summed_by_hand
from torch import Tensor, nn

from mtaccum.memory import measure_peak
from mtaccum.model import TRUNK

__all__ = ["compare", "measure", "state_after"]

CASE = "dense-8"
ROUNDS, QUICK_ROUNDS = 12, 3
State = dict[str, dict[str, Tensor]]


def measure(kind: str, peer: str, device: str, quick: bool, reference: Path) -> dict[str, Any]:
    """What a row of the table has from ``kind``, ``memory`` or ``times``; or why it has nothing, where the
    peer's library is missing or too old.

    Args:
        reference: a file; the baseline's memory writes its gradients there, that of others reads them.
    """
    case = build_case(CASE, device, quick)
    found: dict[str, Any] = {}

    def use(step: Step) -> None:
        # Here, and not before: a peer may have moved the model, or cleared gradients as it was set up.
        case.make_gradients()
        if kind == "times":
            found.update(_times(case, step, device, quick))
        else:
            found.update(_memory(case, step, device, reference, writes=peer == BASELINE))

    try:
        PEERS[peer].run(case, use)
    except ImportError as error:
        if PEERS[peer].library is None:
            raise
        return {"peer": peer, "skipped": str(error)}
    return {"peer": peer, **found}


def _times(case: Case, step: Step, device: str, quick: bool) -> dict[str, Any]:
    """Seconds of the step and of the baseline, in turns."""
    by_hand = partial(summed_by_hand, case)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    times = interleaved_times({"peer": step, BASELINE: by_hand}, rounds, device, warmups=1)
    ratio = asdict(ratio_of(times["peer"], times[BASELINE]))
    return {"time_over_baseline": ratio, "time_s": times["peer"], "baseline_time_s": times[BASELINE]}


def _memory(case: Case, step: Step, device: str, reference: Path, writes: bool) -> dict[str, Any]:
    """Bytes of the step, and its gradients and statistics against those of the baseline."""
    if device != "cpu":
        # workspaces that libraries keep from their first call on belong to no step
        buffers = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
        step()
        for name, buffer in case.model.named_buffers():
            buffer.copy_(buffers[name])
        case.make_gradients()
    gc.collect()
    existing: list[Tensor | nn.Module] = [case.model, *case.batch.values()]
    report = measure_peak(step, device=device, existing=existing)
    state, in_place = state_after(case, step)
    if writes:
        torch.save(state, reference)
    return {
        "method": report.method,
        "activation_bytes": report.activation_bytes,
        "start_bytes": report.start_bytes,
        "peak_bytes": report.peak_bytes,
        "gradients_in_place": in_place,
        **compare(state, torch.load(reference)),
    }


def state_after(case: Case, step: Step) -> tuple[State, bool]:
    """The model after a step that was run once before, from gradients of zero; it is run once more.

    Two steps, since one from zero looks the same whether gradients are added to or replaced.

    Returns:
        Gradients by node and running statistics of BatchNorm by layer, each as a vector in float64, and how
        often the layers were moved; and whether the gradients are still in the tensors that held them.
    """
    before = [parameter.grad for parameter in case.model.parameters()]
    step()
    after = [parameter.grad for parameter in case.model.parameters()]
    gradients = {name: _vector(_gradients(node)) for name, node in case.model.own_modules().items()}
    layers = {n: layer for n, layer in case.model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    state = {
        "gradients": gradients,
        "statistics": {
            name: _vector([layer.running_mean, layer.running_var]) for name, layer in layers.items()
        },
        "updates": {name: _vector([layer.num_batches_tracked]) for name, layer in layers.items()},
    }
    return state, all(old is new for old, new in zip(before, after, strict=True))


def _gradients(node: nn.Module) -> list[Tensor | None]:
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in node.parameters()
    ]


def _vector(tensors: list[Tensor | None]) -> Tensor:
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors if tensor is not None])


def compare(state: State, reference: State) -> dict[str, Any]:
    """The greatest differences between two states, each relative to the reference's norm."""
    trunk = next(name for name in state["updates"] if name.startswith(TRUNK))
    return {
        "gradient_difference": _greatest(state["gradients"], reference["gradients"]),
        "statistics_difference": _greatest(state["statistics"], reference["statistics"]),
        # of two steps
        "trunk_statistics_updates": float(state["updates"][trunk]) / 2,
    }


def _greatest(values: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    differences = {name: (value - reference[name]).norm() for name, value in values.items()}
    return max(float(difference / reference[name].norm()) for name, difference in differences.items())
