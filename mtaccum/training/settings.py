"""When a training does what, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from mtaccum.memory import PeakReport
from mtaccum.training.evaluation import Evaluation


@dataclass(frozen=True)
class TrainerSettings:
    """When a training ends, and what it does meanwhile. All intervals are in optimizer steps; 0: never.

    Attributes:
        total_steps: optimizer steps of the whole training.
        log_every, eval_every, checkpoint_every: intervals; evaluation and checkpoint at the end always.
        monitor: what the best state is judged by: ``loss`` (weighted over the tasks) or ``task/metric``.
        maximize: whether more of it is better.
        patience: stop after so many evaluations without a better state; None: don't.
        ema_decay: evaluate and keep a moving average of the weights with this decay per step; None: don't.
        pictures: how many validation samples of each dense task are drawn at an evaluation, for the loggers
            that take pictures; 0: none.
    """

    total_steps: int
    log_every: int = 50
    eval_every: int = 0
    checkpoint_every: int = 0
    monitor: str = "loss"
    maximize: bool = False
    patience: int | None = None
    ema_decay: float | None = None
    pictures: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes:
        steps, micro_batches, samples: how many were run, resumed ones included.
        evaluation: validation metrics of the last state.
        peak: of one measured step; None if no step was run.
        interrupted: whether somebody stopped it before its end.
        elapsed_s: wall time of this process's part.
    """

    steps: int
    micro_batches: int
    samples: int
    evaluation: Evaluation
    peak: PeakReport | None
    interrupted: bool
    elapsed_s: float
