"""Prediction: the engine's own step, run on fake tensors under the tracker. Nothing is allocated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mtaccum.batch import batch_size_of, split_batch, take_micro_batch
from mtaccum.engine import Engine, LabelCounts, StepOptions
from mtaccum.engine.nonfinite import assuming_finite
from mtaccum.errors import MtaccumError
from mtaccum.memory.fake import build_empty, fake_nest, make_fake, make_state
from mtaccum.memory.flops import flops_of
from mtaccum.memory.kernels import CpuKernels
from mtaccum.memory.labels import labelling, state_tensors
from mtaccum.memory.ledger import OPTIMIZER, PARAMETERS
from mtaccum.memory.refusals import NoRecurrence, check_arguments, check_model, check_optimizer, explained
from mtaccum.memory.substitutes import NoScaler, NotingWindow, as_on_cuda, offloading, representatives
from mtaccum.memory.tracker import LiveBytes, Moment
from mtaccum.model import MultiTaskModel, evaluating
from mtaccum.state import random_state_kept
from mtaccum.structure import map_tensors, tensors_of
from mtaccum.torch_internals import FakeTensorMode

BuildModel = Callable[[], MultiTaskModel]
BuildOptimizer = Callable[[MultiTaskModel], Optimizer]


@dataclass(frozen=True)
class Prediction:
    """What a step would need, parameters, optimizer state and inputs included.

    Attributes:
        peak_bytes: most live tensor bytes during the step.
        start_bytes: alive before it.
        stage: what is going on at the peak.
        by_kind: what the peak consists of, in bytes.
        flops: floating-point operations of the step's matrix products, convolutions and attention.
        timeline: the ops of the step, if asked for.
    """

    peak_bytes: int
    start_bytes: int
    stage: str
    by_kind: Mapping[str, int]
    flops: int
    timeline: Sequence[Moment] = field(default=(), repr=False)


class FlopTracker(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts FLOPs too."""

    def __init__(self, existing: Any, *, timeline: bool = False) -> None:
        super().__init__(existing, timeline=timeline)
        self.flops = 0

    def counted(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self.flops += flops_of(func, args, kwargs, result)


class FakeTraining:
    """A model, its optimizer and a batch on fake tensors, on which steps are predicted.

    Args:
        build_model: returns the model; called on the device ``meta``.
        batch: a real batch of one step: its labels are counted; of all else the shapes are used.
        build_optimizer: makes the optimizer of a model; AdamW if none is given.
        device: ``cpu``; or ``cuda``, for an estimate: optimizers work on lists of tensors there, and only the
            micro-batch that runs lies on the device.
        options: of the steps. Modules are predicted as they are, not compiled, and ``batchnorm="sync"`` as
            ``keep``.
        copies: further copies of the model that live beside it, such as averaged weights.

    Raises:
        PredictionError: recurrent layers, whose kernels' memory isn't known, sparse gradients, or a step that
            depends on values.
        MtaccumError: whatever ``Engine`` or its ``step`` raises.
    """

    def __init__(
        self,
        build_model: BuildModel,
        batch: Any,
        *,
        build_optimizer: BuildOptimizer | None = None,
        device: torch.device | str = "cpu",
        options: StepOptions | None = None,
        copies: int = 0,
    ) -> None:
        build_optimizer = build_optimizer or (lambda model: AdamW(model.parameters()))
        check_arguments(build_model, batch, build_optimizer)
        self.batch = batch
        self.device_type = torch.device(device).type
        self.options = StepOptions() if options is None else options
        self._build_model = build_model
        self._counting: MultiTaskModel | None = None
        self._counted: dict[object, LabelCounts] = {}
        # what hides outside of modules is converted where it is met
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            self._take(build_empty(build_model), build_optimizer, copies)
        except MtaccumError as error:
            if "meta" not in str(error):
                raise
            with random_state_kept():  # what hides was made on that device
                self._take(build_model(), build_optimizer, copies)

    def _take(self, model: MultiTaskModel, build_optimizer: BuildOptimizer, copies: int) -> None:
        """Make a model fake, with its optimizer and copies."""
        check_model(model)
        self.model = model = make_fake(model, self.mode)
        with self.mode, explained(model):
            self.optimizer = check_optimizer(build_optimizer(model))
            if self.device_type == "cuda":
                as_on_cuda(self.optimizer)
            held = [*model.parameters(), *model.buffers()]
            self.copies = [torch.empty_like(tensor) for _ in range(copies) for tensor in held]
        self._learn_once()

    def predict(
        self,
        options: StepOptions | None = None,
        accumulate: int = 1,
        *,
        timeline: bool = False,
        make_tracker: Callable[..., FlopTracker] = FlopTracker,
    ) -> Prediction:
        """The memory of one step, once the optimizer has its state.

        Of many micro-batches three of each kind are run, alike in size and in which tasks have labels; the
        others would repeat these.

        Args:
            options: of the step; None: those of the training.
            accumulate: into how many micro-batches the batch is split.

        Raises:
            PredictionError: the step reads values that fake tensors don't have.
            MtaccumError: whatever ``Engine`` or its ``step`` raises.
        """
        options = self.options if options is None else options
        real = split_batch(self.batch, accumulate)
        engine = self._engine(options)
        sizes = [batch_size_of(micro_batch) for micro_batch in real]
        labels = self._labels(real, options)
        chosen = representatives(labels, sizes)
        silence = warnings.catch_warnings(action="ignore")  # they are for whoever runs it
        with random_state_kept(), self.mode, silence, explained(self.model):
            batch = fake_nest(self.batch, self.mode)
            samples = batch_size_of(batch)
            parts = [take_micro_batch(batch, samples, accumulate, index) for index in chosen]
            lying = batch
            if self.device_type != "cpu":  # a micro-batch with storages of its own
                lying = map_tensors(max(parts, key=batch_size_of), torch.empty_like, strict=False)
            alive: list[Tensor | nn.Module] = [
                self.model,
                *(*self.copies, *state_tensors(self.optimizer), *tensors_of(lying, strict=False)),
            ]
            tracker = make_tracker(alive, timeline=timeline)
            tracker.label(state_tensors(self.optimizer), OPTIMIZER)
            tracker.label(self.copies, PARAMETERS)
            tracker.reset_peak()
            window = NotingWindow(parts, lambda: tracker.flops)
            start = tracker.current_bytes
            away = offloading() if options.offload else nullcontext()
            kernels = CpuKernels() if self.device_type == "cpu" else nullcontext()
            labelled = labelling(tracker, self.model, self.optimizer)
            with kernels, tracker, labelled, away, assuming_finite():
                engine.step(window, labels.take(chosen))
        return Prediction(
            tracker.peak_bytes,
            start,
            tracker.peak_stage,
            tracker.peak_by_kind,
            round(sum(n * flops for n, flops in zip(chosen.values(), window.differences(), strict=True))),
            tracker.timeline if timeline else (),
        )

    def _learn_once(self) -> None:
        """The state that the optimizer has once all tasks have had labels."""
        engine = self._engine(self.options)
        labels = self._labels([self.batch], self.options)
        silence = warnings.catch_warnings(action="ignore")
        with random_state_kept(), self.mode, NoRecurrence(), silence, explained(self.model):
            engine.accumulate([fake_nest(self.batch, self.mode)], labels)
            learning = {id(p): p for p in self.model.parameters() if p.grad is not None}
            for name, total in labels.totals.items():
                if total == 0 and self.model.task(name).mode != "frozen":
                    for node in self.model.paths[name]:
                        learning |= {id(p): p for p in self.model.node(node).parameters() if p.requires_grad}
        with self.mode, explained(self.model, f"the step of {type(self.optimizer).__name__}"):
            make_state(self.optimizer, learning.values())

    def leaves_out(self, micro_batches: int) -> bool:
        """Whether some of so many micro-batches lack the labels of a task that has some, and don't run it."""
        counts = self._labels(split_batch(self.batch, micro_batches), self.options).counts.values()
        return any(any(numbers) and not all(numbers) for numbers in counts)

    def _engine(self, options: StepOptions) -> Engine:
        changes: dict[str, Any] = {"offload": False, "compile": False, "comm_hook": "none"}
        if options.batchnorm == "sync":
            changes["batchnorm"] = "keep"
        options = options.changed(changes)
        scaler = NoScaler() if options.precision == "fp16" else None
        return Engine(self.model, self.optimizer, options=options, scaler=scaler, parallel="none")

    def _labels(self, window: Sequence[Any], options: StepOptions) -> LabelCounts:
        """The labels, counted by the tasks; by those of a real model where they need its tensors."""
        chunks = options.chunked
        key = len(window), tuple(chunks.items())
        if key not in self._counted and self._counting is None:
            try:
                self._counted[key] = LabelCounts.of(self.model.tasks_by_name(), window, chunks)
            except (MtaccumError, RuntimeError, AssertionError, TypeError):
                with random_state_kept():
                    self._counting = self._build_model()
        if key not in self._counted:
            assert self._counting is not None
            self._counted[key] = LabelCounts.of(self._counting.tasks_by_name(), window, chunks)
        return self._counted[key]


def predict_evaluation(training: FakeTraining, samples: int) -> int:
    """Bytes at the peak of an evaluation of so many samples at once, in proportion to those of the batch."""
    model = training.model
    with random_state_kept(), training.mode, explained(model), evaluating(model):
        batch = fake_nest(training.batch, training.mode)
        held: list[Tensor | nn.Module] = [model, *training.copies, *state_tensors(training.optimizer)]
        tracker = FlopTracker([*held, *tensors_of(batch, strict=False)])
        fixed = FlopTracker(held).current_bytes
        with tracker:
            model(batch)
    return fixed + round((tracker.peak_bytes - fixed) * samples / max(1, batch_size_of(training.batch)))
