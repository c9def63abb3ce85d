"""The planner: from a profile to the cheapest way of running a step that fits, predicted as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch

from mtaccum.batch import batch_size_of
from mtaccum.engine import SCHEDULES, StepOptions
from mtaccum.engine.options import takes_step_options
from mtaccum.errors import BatchError, BudgetError, ConfigError, MtaccumError, PredictionError, listed
from mtaccum.memory import FakeTraining, Prediction
from mtaccum.memory.predict import BuildModel, BuildOptimizer
from mtaccum.planning.budget import Budget, budget_of
from mtaccum.planning.facts import Facts, Heads
from mtaccum.planning.forests import Forests
from mtaccum.planning.plan import EXACT, IN_DISTRIBUTION, INEXACT, PLANNED, Plan, PlanReport, refusal
from mtaccum.planning.search import Branch, Choice
from mtaccum.planning.watcher import profile_of

_CORRECTIONS = 3  # how often a budget is tightened where the search promised too much
_TRUSTED = 1.1  # what the search promises is this right, at least
_ON_THE_FRONT = (0.6, 0.2)  # where between the least and the most memory the front is shown


class _Way(NamedTuple):
    """A way to run a step: its options, and into how many micro-batches the batch is split."""

    options: StepOptions
    accumulate: int = 1


class _Promise(NamedTuple):
    """A plan that the search has found, before it is predicted.

    Attributes:
        order: less is to be looked at earlier: by its FLOPs.
        needed_bytes: what the search thinks that it needs.
        available: what it was given.
        tries: how often it has been looked for.
        micro_batches, heads: as of ``Forests.of``.
    """

    order: tuple[float, ...]
    needed_bytes: float
    available: float
    tries: int
    micro_batches: int
    heads: Heads


@takes_step_options
def find_plan(
    build_model: BuildModel,
    batch: Any,
    *,
    budget_bytes: int | str | None = None,
    device: torch.device | str = "cpu",
    build_optimizer: BuildOptimizer | None = None,
    options: StepOptions | None = None,
    **step_options: Any,
) -> PlanReport:
    """The fastest way to run a step on a batch within a budget, before anything is allocated.

        report = find_plan(build_model, batch, budget_bytes="6GiB")
        print(report)
        plan = report.recommended
        engine = Engine(build_model(), optimizer, options=plan.options)
        engine.step(split_batch(batch, plan.accumulate))

    Args:
        build_model: returns the ``MultiTaskModel``. It is called on the device ``meta``, so it should not
            load weights; one whose constructors read tensors' values is built for real. A model with
            real parameters that was there before stays as it is.
        batch: a real batch of one step, with labels of all tasks: they are counted, of all else the shapes
            are used.
        budget_bytes: bytes, or a text such as ``6GiB``; None: what is free on the device.
        device: ``cpu`` or ``cuda``. For a CUDA card the plan is an estimate, with a reserve.
        build_optimizer: makes the optimizer of the model; AdamW if none is given.
        options, step_options: as for ``Engine``; those that a plan chooses (``PLANNED``) are left at their
            defaults.

    Raises:
        BudgetError: nothing fits; says how little memory can do, and what that consists of.
        PredictionError: recurrent layers, or a model whose memory depends on values.
        ConfigError: no amount of memory, more than the device has, no functions that make a model and its
            optimizer, or an option that a plan chooses.
        BatchError: a batch without any label.
    """
    asked = (StepOptions() if options is None else options).changed(step_options)
    if chosen := sorted(asked.given().keys() & set(PLANNED)):
        raise ConfigError(f"{', '.join(chosen)}: a plan chooses that. Leave it out.")
    budget = budget_of(budget_bytes, device)
    training = FakeTraining(
        build_model, batch, build_optimizer=build_optimizer, device=budget.device, options=asked
    )
    report = plan_training(training, budget)
    if report.recommended is None:
        raise BudgetError(refusal(budget, report.smallest))
    return report


def plan_training(training: FakeTraining, budget: Budget, notes: Sequence[str] = ()) -> PlanReport:
    """A report on the plans for a training, whether or not any fits."""
    started = time.monotonic()
    planner = _Planner(training, budget.tensor_bytes)
    planner.smallest()  # one of those to recommend
    planner.look_along()
    recommended = planner.recommend()
    smallest = planner.smallest()  # of all that is known by now
    front = planner.pareto_front(recommended)
    schedules, notes = planner.schedules(), [*planner.notes(), *notes]
    elapsed_s = time.monotonic() - started
    return PlanReport(budget, recommended, front, smallest, schedules, planner.samples, notes, elapsed_s)


class _Planner:
    """Looks for plans, and remembers all that it has predicted."""

    def __init__(self, training: FakeTraining, budget_bytes: int) -> None:
        self.training, self.budget_bytes = training, budget_bytes
        self.samples = batch_size_of(training.batch)
        if self.samples < 1:
            raise BatchError("the batch is empty: give one with at least one sample.")
        self._summed = training.predict(self._options("summed"), timeline=True)
        self._profile = profile_of(training)
        enabled = training.model.enabled_tasks()
        if not enabled:
            raise ConfigError("no task is trained: all are switched off, or have weight 0.")
        if not any(name in self._profile.chains for name in enabled):
            raise BatchError(
                f"the batch has no label of any task ({listed(enabled)}): give one with labels of all."
            )
        self._facts = Facts(training, self._profile.chains)
        self._forests = Forests(self._profile, self._facts.tree, self.samples)
        self._plans: dict[_Way, Plan | None] = {}
        self._errors: dict[_Way, str] = {}
        self._spared_flops: dict[int, int] = {}
        self._add(_Way(self._options("summed")), self._summed)
        self._add(_Way(self._options("split")), self._profile.prediction)
        self._add(_Way(self._options("sequential")))

    def recommend(self) -> Plan | None:
        """The best plan that fits. What makes gradients less exact is tried only where nothing else fits."""
        for exactness in (EXACT, IN_DISTRIBUTION, INEXACT):
            self._spare_idle_tasks(exactness)
            self._search(exactness)
            fitting = [p for p in self._known() if p.exactness == exactness and self._fits(p)]
            if fitting:
                return self._with_groups(min(fitting, key=lambda plan: plan.rank))
        return None

    def schedules(self) -> dict[str, Plan]:
        """Each schedule by itself, as far as it runs."""
        plans = {name: self._plans[_Way(self._options(name))] for name in SCHEDULES}
        return {name: plan for name, plan in plans.items() if plan is not None}

    def smallest(self) -> Plan:
        """The plan with the least memory that can be reached, whatever it costs: the better of the two that
        the search promises most of and that can be run."""
        found: list[int] = []
        for micro_batches in (*reversed(self._forests.micro_batches[-3:]), 1):
            for heads in (self._facts.chunkable, frozenset[str]()):
                promised = self._forests.of(micro_batches, heads).least().needed_bytes
                if found and promised > _TRUSTED * min(found):
                    break  # the search is never that wrong
                if (plan := self._best(micro_batches, heads, Branch.least)) is not None:
                    found.append(plan.peak_bytes)
                    break
            if len(found) == 2:
                break
        for heads in (self._facts.quiet, frozenset[str]()):
            self._best(1, heads, Branch.least)
        return min(self._known(), key=lambda plan: (plan.peak_bytes, plan.rank))

    def look_along(self) -> None:
        """Plans between the least and the most memory, to be shown; any of them may be recommended."""
        forest = self._forests.of(1, frozenset())
        most, least = forest.cheapest().needed_bytes, forest.least().needed_bytes
        for part in _ON_THE_FRONT:
            self._best(1, frozenset(), partial(Branch.best, available_bytes=least + part * (most - least)))
        if self.samples > 1:
            self._add(_Way(self._options("split"), 2))

    def pareto_front(self, recommended: Plan | None) -> list[Plan]:
        """Plans that no other beats, and the joint backward; most memory first."""
        known = self._known()
        baseline = self._options("summed")
        shown = [
            plan
            for plan in known
            if plan is recommended
            or (plan.options, plan.accumulate) == (baseline, 1)
            or not any(
                _beats(p, plan) or (p is recommended and _measures(p) == _measures(plan)) for p in known
            )
        ]
        return sorted(shown, key=lambda plan: (-plan.peak_bytes, plan.rank))

    def notes(self) -> list[str]:
        return self._facts.notes(self._profile.ops)

    def _spare_idle_tasks(self, exactness: int) -> None:
        """Where some micro-batches lack the labels of a task, more of them may take fewer FLOPs."""
        for micro_batches in self._forests.micro_batches:
            alike = self._facts.exactness(micro_batches, frozenset())[0] == exactness
            if alike and micro_batches > 1 and self.training.leaves_out(micro_batches):
                plan = self._add(_Way(self._options("split"), micro_batches))
                if plan is not None:
                    spared = self._profile.prediction.flops - plan.prediction.flops
                    self._spared_flops[micro_batches] = spared

    def _search(self, exactness: int) -> None:
        """Let the search find the cheapest plan of a kind, and predict it; up to one that fits."""
        ways = [
            (micro_batches, heads)
            for micro_batches in self._forests.micro_batches
            for heads in {frozenset[str](), self._facts.quiet, self._facts.chunkable}
            if self._facts.exactness(micro_batches, heads)[0] == exactness
        ]
        promised: list[_Promise] = []
        for micro_batches, heads in ways:
            self._promise(promised, micro_batches, heads, self.budget_bytes)
        while promised:
            found = heappop(promised)
            plan = self._best(
                found.micro_batches, found.heads, partial(Branch.best, available_bytes=found.available)
            )
            if plan is not None and self._fits(plan):
                break
            if plan is not None and found.tries < _CORRECTIONS:
                # less than it promised, by more than what it was wrong by
                available = found.needed_bytes - 1.1 * (plan.peak_bytes - self.budget_bytes)
                self._promise(promised, found.micro_batches, found.heads, available, found.tries + 1)
        if exactness == EXACT and self.training.device_type == "cuda":
            self._add(_Way(self._options("split", offload=True)))

    def _promise(
        self, promised: list[_Promise], micro_batches: int, heads: Heads, available: float, tries: int = 1
    ) -> None:
        """What the search finds for so many bytes, put in its place among the others, the cheapest first."""
        choice = self._forests.of(micro_batches, heads).best(available)
        if choice is not None:
            order = choice.cost - self._spared_flops.get(micro_batches, 0), micro_batches, len(heads)
            heappush(promised, _Promise(order, choice.needed_bytes, available, tries, micro_batches, heads))

    def _with_groups(self, plan: Plan) -> Plan:
        """The plan with small heads that share a backward, where that fits too."""
        groups = tuple(self._facts.small_heads(plan, self._summed.flops))
        if plan.options.schedule == "summed" or not groups:
            return plan
        grouped = self._add(_Way(plan.options.changed({"head_groups": groups}), plan.accumulate))
        return plan if grouped is None or not self._fits(grouped) else grouped

    def _best(
        self, micro_batches: int, heads: Heads, choose: Callable[[Branch], Choice | None]
    ) -> Plan | None:
        """What the search chooses, predicted; without segments that turn out not to run twice."""
        while (choice := choose(self._forests.of(micro_batches, heads))) is not None:
            options = self._options("split", recompute=choice.recompute, chunks=dict(choice.chunks))
            way = _Way(options, micro_batches)
            if (plan := self._add(way)) is not None:
                return plan
            failed = [part for part in options.recompute if repr(part) in self._errors.get(way, "")]
            if not self._forests.leave_out(failed):
                return None
        return None

    def _options(self, schedule: str, **chosen: Any) -> StepOptions:
        """The training's own options, with what a plan chooses."""
        return self.training.options.changed({"schedule": schedule, **chosen})

    def _add(self, way: _Way, prediction: Prediction | None = None) -> Plan | None:
        """Predict a plan; None if it can't be run: a layer that refuses so few samples, for instance."""
        if way not in self._plans:
            try:
                prediction = prediction or self.training.predict(*way, timeline=True)
                exactness, why = self._facts.exactness(way.accumulate, frozenset(way.options.chunked))
                ratio = prediction.flops / max(1, self._summed.flops)
                self._plans[way] = Plan(way.options, way.accumulate, prediction, ratio, exactness, why)
            except PredictionError:
                raise
            except MtaccumError as error:
                self._plans[way], self._errors[way] = None, str(error)
        return self._plans[way]

    def _known(self) -> list[Plan]:
        return [plan for plan in self._plans.values() if plan is not None]

    def _fits(self, plan: Plan) -> bool:
        return plan.peak_bytes <= self.budget_bytes


def _measures(plan: Plan) -> tuple[float, ...]:
    """What plans are compared by; less is better."""
    ratio = round(plan.flops_over_summed, 3)
    return plan.peak_bytes, ratio, plan.exactness, plan.accumulate, plan.options.offload


def _beats(other: Plan, plan: Plan) -> bool:
    """Whether another plan is at least as good in all, and better in something."""
    its, mine = _measures(other), _measures(plan)
    return its != mine and all(i <= m for i, m in zip(its, mine, strict=True))
