"""Plan: a way to run a step, with what it needs and costs; and the report on all that were looked at."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtaccum.memory import How, Prediction, format_bytes
from mtaccum.planning.budget import Budget

EXACT, IN_DISTRIBUTION, INEXACT = range(3)
EXACTNESS = ("exact", "exact in distribution", "not exact")


@dataclass(frozen=True)
class Plan:
    """A way to run a step, predicted as a whole.

    Attributes:
        how: schedule, K, and what is recomputed, grouped, chunked or offloaded.
        prediction: its memory and FLOPs.
        flops_over_summed: its FLOPs over those of the joint backward.
        exactness: 0: the gradients of the joint backward over the whole batch; 1: these for other dropout
            masks; 2: not these.
        why: why it isn't exact; "" if it is.
    """

    how: How
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
        how = self.how
        pieces = sum(number for _, number in how.chunks) - sum(len(group) - 1 for group in how.groups)
        pieces += len(how.recompute)
        return (
            self.exactness,
            how.offload,
            round(self.flops_over_summed, 3),
            how.accumulate,
            pieces,
            self.peak_bytes,
        )

    def engine_arguments(self) -> dict[str, Any]:
        """The arguments of ``Engine``; the batch goes to ``step`` as ``split_batch(batch, K)``."""
        how = self.how
        given = {
            "recompute": list(how.recompute),
            "groups": [list(group) for group in how.groups],
            "chunks": dict(how.chunks),
            "offload": how.offload,
        }
        return {"schedule": how.schedule, **{name: value for name, value in given.items() if value}}

    def overrides(self) -> list[str]:
        """The options of the command."""
        how = self.how
        words = [f"engine={how.schedule}", f"accumulate={how.accumulate}"]
        if how.recompute:
            words.append(f"engine.recompute={_listed(how.recompute)}")
        if how.groups:
            words.append(f"engine.groups=[{','.join(map(_listed, how.groups))}]")
        if how.chunks:
            # Hydra's grammar has no quotes for keys
            chunks = ",".join(f"{name}:{number}" for name, number in how.chunks)
            words.append(f"engine.chunks={{{chunks}}}")
        if how.offload:
            words.append("engine.offload=true")
        return words

    def describe(self) -> str:
        """In a few words: ``split, K=4, recompute 3 parts``."""
        how = self.how
        words = [how.schedule]
        if how.recompute:
            words.append(f"recompute {len(how.recompute)} part{'s' * (len(how.recompute) != 1)}")
        if how.groups:
            words.append("group " + ", ".join("+".join(group) for group in how.groups))
        words += [f"{name} in {number} chunks" for name, number in how.chunks]
        return ", ".join([*words, *["offload"] * how.offload])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        prediction = self.prediction
        return {
            **asdict(self.how),
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
        front: plans that no other beats in memory, FLOPs and exactness at once, most memory first; and the
            joint backward, to compare with.
        smallest: the plan with the smallest peak.
        schedules: each schedule by itself, in one micro-batch.
        samples: of a batch.
        notes: what may make the truth differ.
        elapsed_s: seconds that planning took.
    """

    budget: Budget
    recommended: Plan | None
    front: Sequence[Plan]
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
        return f"{plan.describe()}, accumulate={plan.how.accumulate}: {peak}; {kept}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "budget": {**asdict(self.budget), "tensor_bytes": self.budget.tensor_bytes},
            "batch_size": self.samples,
            "recommended": None if self.recommended is None else self.recommended.as_dict(),
            "front": [plan.as_dict() for plan in self.front],
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
                str(plan.how.accumulate),
                EXACTNESS[plan.exactness],
                plan.describe(),
            )
            for plan in self.front
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [_line(row, widths) for row in (head, *rows)]
        card = "a CUDA card that isn't there" if self.budget.absent else "a CUDA card"
        estimate = f"An estimate for {card}, predicted with the operations of the CPU.\n"
        estimate = estimate if self.budget.device == "cuda" else ""
        why = {plan.why: EXACTNESS[plan.exactness] for plan in self.front if plan.why}
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
        f"({smallest.peak_bytes:,} bytes; {smallest.describe()}, accumulate={smallest.how.accumulate}; "
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


def _quoted(name: str) -> str:
    """A name as Hydra's grammar takes it literally."""
    plain = re.fullmatch(r"[A-Za-z_][\w.]*", name) and name.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    )
    return name if plain else f'"{name}"'


def _listed(names: Sequence[str]) -> str:
    return f"[{','.join(map(_quoted, names))}]"
