"""Planning: the fastest way to run a step that fits a memory budget."""

from mtaccum.planning.budget import Budget, budget_of
from mtaccum.planning.plan import PLANNED, Plan, PlanReport
from mtaccum.planning.planner import find_plan, plan_training

__all__ = ["PLANNED", "Budget", "Plan", "PlanReport", "budget_of", "find_plan", "plan_training"]
