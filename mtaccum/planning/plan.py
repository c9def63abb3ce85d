"""Plan: a way to run a step, with what it needs and costs; and the report on all that were looked at."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtaccum.engine import StepOptions
from mtaccum.engine.options import plain
from mtaccum.memory import Prediction, format_bytes
from mtaccum.planning.budget import Budget

PLANNED = ("schedule", "recompute", "head_groups", "chunks", "offload")
"""The options of a step that a plan chooses."""

EXACT, IN_DISTRIBUTION, INEXACT = range(3)
EXACTNESS = ("exact", "exact in distribution", "not exact")


@dataclass(frozen=True)
class Plan:
    """A way to run a step, predicted as a whole.

    Attributes:
        options: of the step: schedule, and what is recomputed, grouped, chunked or offloaded among them.
        accumulate: K, into how many micro-batches the batch is split.
        prediction: its memory and FLOPs.
        flops_over_summed: its FLOPs over those of the joint backward.
        exactness: 0: the gradients of the joint backward over the whole batch; 1: these for other dropout
            masks; 2: not these.
        why: why it isn't exact; "" if it is.
    """

    options: StepOptions
    accumulate: int
    prediction: Prediction
    flops_over_summed: float
    exactness: int = EXACT
    why: str = ""

    @property
    def peak_bytes(self) -> int:
        """Predicted live tensor bytes at the peak."""
        return self.prediction.peak_bytes

    @property
    def rank(self) -> tuple[float, ...]:
        """Less is better: exactness, then FLOPs, then micro-batches, then pieces that run by themselves, then
        memory."""
        options = self.options
        pieces = sum(options.chunked.values()) - sum(len(group) - 1 for group in options.head_groups)
        pieces += len(options.recompute)
        return (
            self.exactness,
            options.offload,
            round(self.flops_over_summed, 3),
            self.accumulate,
            pieces,
            self.peak_bytes,
        )

    def overrides(self) -> list[str]:
        """What the plan has chosen, as options of the command."""
        given = self.options.given()
        return [
            f"engine={self.options.schedule}",
            f"accumulate={self.accumulate}",
            *(f"engine.{name}={override_value(given[name])}" for name in PLANNED[1:] if name in given),
        ]

    def describe(self) -> str:
        """In a few words: ``split, K=4, recompute 3 segments``."""
        options = self.options
        words = [options.schedule]
        if number := len(options.recompute):
            words.append(f"recompute {number} segment{'s' * (number != 1)}")
        if options.head_groups:
            words.append("group " + ", ".join("+".join(group) for group in options.head_groups))
        words += [f"{name} in {number} chunks" for name, number in options.chunked.items()]
        return ", ".join([*words, *["offload"] * options.offload])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        prediction = self.prediction
        return {
            **{name: plain(getattr(self.options, name)) for name in PLANNED},
            "accumulate": self.accumulate,
            "peak_bytes": prediction.peak_bytes,
            "start_bytes": prediction.start_bytes,
            "peak_stage": prediction.stage,
            "peak_by_kind": dict(prediction.by_kind),
            "flops": prediction.flops,
            "flops_over_summed": self.flops_over_summed,
            "exactness": EXACTNESS[self.exactness],
            "why": self.why,
            "overrides": self.overrides(),
        }


@dataclass(frozen=True)
class PlanReport:
    """What was planned.

    Attributes:
        budget: what it was to fit.
        recommended: the fastest plan that fits; None if none does.
        pareto_front: plans that no other beats in memory, FLOPs and exactness at once, most memory first; and
            the joint backward, to compare with.
        smallest: the plan with the smallest peak.
        schedules: each schedule by itself, in one micro-batch.
        samples: of a batch.
        notes: what may make the truth differ.
        elapsed_s: seconds that planning took.
    """

    budget: Budget
    recommended: Plan | None
    pareto_front: Sequence[Plan]
    smallest: Plan
    schedules: Mapping[str, Plan]
    samples: int
    notes: Sequence[str] = ()
    elapsed_s: float = 0.0

    def reasons(self) -> str:
        """Why this plan, in a sentence; or why there is none."""
        plan = self.recommended
        if plan is None:
            return refusal(self.budget, self.smallest)
        kept = "the cheapest in FLOPs that fits"
        if plan.exactness == EXACT:
            kept += ", with exact gradients"
        else:
            kept += f"; {EXACTNESS[plan.exactness]}: {plan.why} (nothing more exact fits)"
        peak = (
            f"{format_bytes(plan.peak_bytes)} predicted, {plan.flops_over_summed:.2f} of the FLOPs of summed"
        )
        return f"{plan.describe()}, accumulate={plan.accumulate}: {peak}; {kept}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "budget": {**asdict(self.budget), "tensor_bytes": self.budget.tensor_bytes},
            "batch_size": self.samples,
            "recommended": None if self.recommended is None else self.recommended.as_dict(),
            "pareto_front": [plan.as_dict() for plan in self.pareto_front],
            "smallest": self.smallest.as_dict(),
            "schedules": {name: plan.as_dict() for name, plan in self.schedules.items()},
            "reasons": self.reasons(),
            "notes": list(self.notes),
            "elapsed_s": round(self.elapsed_s, 3),
        }

    def __str__(self) -> str:
        head = ("", "predicted peak", "FLOPs / summed", "K", "gradients", "plan")
        rows = [
            (
                "->" if plan is self.recommended else "",
                format_bytes(plan.peak_bytes),
                f"{plan.flops_over_summed:.3f}",
                str(plan.accumulate),
                EXACTNESS[plan.exactness],
                plan.describe(),
            )
            for plan in self.pareto_front
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [_line(row, widths) for row in (head, *rows)]
        card = "a CUDA card that isn't there" if self.budget.absent else "a CUDA card"
        estimate = f"An estimate for {card}, predicted with the operations of the CPU.\n"
        estimate = estimate if self.budget.device == "cuda" else ""
        why = {plan.why: EXACTNESS[plan.exactness] for plan in self.pareto_front if plan.why}
        notes = [*(f"{kind}: {text}" for text, kind in why.items()), *self.notes]
        text = [f"{estimate}{self.budget}", "", *lines, "", *(f"note: {note}" for note in notes)]
        if self.recommended is None:
            return "\n".join([*text, self.reasons()])
        return "\n".join([*text, f"-> {self.reasons()}", "", f"  {shlex.join(self.recommended.overrides())}"])


def refusal(budget: Budget, smallest: Plan) -> str:
    """Why nothing fits, and what the least that can be reached consists of."""
    parts = [
        f"{kind} {format_bytes(nbytes)}"
        for kind, nbytes in sorted(smallest.prediction.by_kind.items(), key=lambda item: -item[1])
        if nbytes
    ]
    exactness = EXACTNESS[smallest.exactness] + (f": {smallest.why}" if smallest.why else "")
    room = f"{format_bytes(budget.tensor_bytes)} ({budget.tensor_bytes:,} bytes)"
    return (
        f"nothing fits {room}. The smallest peak found is {format_bytes(smallest.peak_bytes)} "
        f"({smallest.peak_bytes:,} bytes; {smallest.describe()}, accumulate={smallest.accumulate}; "
        f"{exactness}), in {smallest.prediction.stage}: {', '.join(parts)}. Left are a smaller batch, "
        f"smaller inputs, a smaller model, an optimizer with less state, or precision=bf16."
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers to the right, text to the left."""
    right = (1, 2, 3)
    padded = [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


# --- values as the grammar of the command (Hydra's) takes them literally ---

# what the grammar reads as a text without quotes, in lists too
_PLAIN = re.compile(r"[A-Za-z_./-][\w./-]*")
_NOT_TEXT = {"null", "true", "false", "nan", "inf", "-inf", "on", "off", "yes", "no", "y", "n"}


def override_value(value: Any) -> str:
    """A plain value: ``[trunk.layer1,"trunk.layer3[0:3]"]``, ``{seg:4}``, ``0.5``."""
    if isinstance(value, dict):
        # its keys have no quotes
        return f"{{{','.join(f'{key}:{override_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(override_value, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(text: str) -> str:
    """A text, in quotes where the grammar would take it for something else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT and not text.startswith("-"):
        return text
    # a backslash means something before a quote only, and at the end, where the closing one follows
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), text)
    return f'"{escaped}"'
