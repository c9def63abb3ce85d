"""The passes of a window: all its forwards and backwards, which make the gradient of a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from mtaccum.batch import to_device
from mtaccum.engine.arrangement import Arrangement
from mtaccum.engine.bind import bind
from mtaccum.engine.checks import check_plan, check_window, unreached_parameters
from mtaccum.engine.compiled import Compiled, units
from mtaccum.engine.finite import Search, SearchingLog
from mtaccum.engine.inexact import Inexactness
from mtaccum.engine.norms import normalising, passes_of
from mtaccum.engine.precision import Precision, fresh_casts
from mtaccum.engine.recompute import Recompute
from mtaccum.engine.replay import StateBefore, keeping_frozen
from mtaccum.engine.result import LossLog, StepResult
from mtaccum.engine.schedules import SCHEDULES, Backward
from mtaccum.engine.together import keeping_none, prepare_nodes, with_stand_ins
from mtaccum.engine.window import WindowPlan
from mtaccum.errors import ConfigError, listed
from mtaccum.model.tree import ROOT, MultiTaskModel
from mtaccum.parallel.fsdp import check_modes, is_sharded
from mtaccum.parallel.ranks import Ranks


class Passes:
    """Runs windows forwards and backwards, one graph at a time. Arguments as in ``Engine``.

    Raises:
        ConfigError: parts to recompute that aren't there, or options that ``torch.compile`` doesn't take.
    """

    def __init__(
        self,
        model: MultiTaskModel,
        arrangement: Arrangement,
        precision: Precision,
        ranks: Ranks,
        *,
        schedule: str,
        backward: Backward,
        batchnorm: str,
        offload: bool,
        recompute: Sequence[str],
        compile: bool | Mapping[str, Any],
    ) -> None:
        if not isinstance(compile, bool | Mapping):
            raise ConfigError(f"compile must be True, False or a dict of options, got {compile!r}.")
        self.model = model
        self.arrangement = arrangement
        self.precision = precision
        self.ranks = ranks
        self.schedule = schedule
        self.backward = backward
        self.batchnorm = batchnorm
        self.offload = offload
        self.recompute = Recompute(model, recompute)
        modules = [] if compile is False else units(model, self.recompute.parts)
        self.compiled = Compiled(modules, dict(compile) if isinstance(compile, Mapping) else {})
        self._sharded = is_sharded(model)
        self._inexactness = Inexactness(
            model, freezes=batchnorm == "freeze", repeats=schedule == "sequential"
        )
        self._looked_for_unreached = False

    def plan(self, window: Sequence[Any]) -> WindowPlan:
        """The counts of a window as a step needs them, chunks included."""
        return WindowPlan.of(self.model.tasks_by_name(), window, self.arrangement.chunks)

    def gradient(self, window: Sequence[Any], plan: WindowPlan | None) -> StepResult:
        """Compute a window's gradient, into ``.grad`` that are all None.

        Args:
            plan: None: the labels are counted here.
        """
        if torch.is_inference_mode_enabled():
            raise ConfigError("nothing can be learned under torch.inference_mode(); leave it first.")
        check_window(self.model, window)
        self.arrangement.check_coupling(self.model, freezes=self.batchnorm == "freeze")
        if self._sharded:
            check_modes(self.model)
        if plan is None:
            plan = self.plan(window)
        else:
            check_plan(self.model, plan, len(window), self.arrangement.chunks)
        plan = plan.agreed(self.ranks, together=self._sharded)
        self._inexactness.warn(plan, stacklevel=3)  # the line of who called the engine
        log = LossLog(plan, self.model.device)
        backward = self.precision.scaled(self.backward)
        with keeping_none(self.model, self.ranks) if self._sharded else nullcontext():
            self._run(window, plan, log, self.schedule, backward, self.arrangement)
        self.recompute.warn_unused(passes_of(self.model, plan), stacklevel=3)
        self._warn_of_unreached(plan)
        return log.result(self.ranks)

    def find_nonfinite(self, window: Sequence[Any], before: StateBefore) -> str | None:
        """Run a window again, task by task, up to the first value that isn't finite, and name it."""
        search = Search(self.model)
        plan = self.plan(window).agreed(self.ranks, together=self._sharded)
        log = SearchingLog(plan, search, window)
        with before.once_more(), search.watching():
            backward = log.looking(self.precision.scaled(self.backward))
            self._run(window, plan, log, "sequential", backward, self.arrangement.apart())
        # the gradient of what is spread over the ranks is that of all of them
        own = self.ranks.size > 1 and not (self._sharded and search.in_gradient)
        finding = f"rank {self.ranks.rank}: {search.finding}" if own and search.finding else search.finding
        found = self.ranks.gather((search.backwards, search.in_gradient, finding))
        return min((f for f in found if f[2]), key=lambda f: f[:2], default=(0, False, None))[2]

    def _run(
        self,
        window: Sequence[Any],
        plan: WindowPlan,
        log: LossLog,
        schedule: str,
        backward: Backward,
        arrangement: Arrangement,
    ) -> None:
        """All forwards and backwards of a window."""
        model, device = self.model, self.model.device
        with (
            normalising(model, self.batchnorm, passes_of(model, plan)),
            keeping_frozen([model.node(name) for name in model.own_modules()]),
            self.compiled.running(),
            self.recompute.running(),
            fresh_casts(),
            save_on_cpu(pin_memory=True) if self.offload else nullcontext(),
        ):
            autocast = partial(self.precision.autocast, device)
            together = plan.union is not None
            for index, batch in enumerate(with_stand_ins(window, plan, self.ranks) if together else window):
                active = plan.running(index)
                if together:
                    tree = model.tree(arrangement.in_order(active))
                    prepare_nodes(model, plan, index, tree, each=log.searches)
                if active:
                    # moved here and bound to no name: on the device is only the micro-batch that runs
                    moved = to_device(batch, device)
                    roots, inputs = bind(model, moved, plan, index, active, log, autocast, arrangement)
                    del moved
                    SCHEDULES[schedule](roots, {ROOT: inputs}, backward)
                    del roots, inputs

    def _warn_of_unreached(self, plan: WindowPlan) -> None:
        """Once, after the first window in which all tasks had labels."""
        if self._looked_for_unreached or 0 in plan.local_totals.values():
            return
        self._looked_for_unreached = True
        if names := unreached_parameters(self.model, plan):
            warnings.warn(
                f"no gradient reached {len(names)} trainable parameters, although their tasks have run: "
                f"{listed(names)}. They won't be trained; use them, or requires_grad_(False) them.",
                stacklevel=4,
            )
