"""Every architecture of ``tests/architectures.py``, run in every way, does what one joint backward does."""

from __future__ import annotations

import pytest
from contract import Case, all_cases, assert_contract, assert_step, pairs, sampled_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is frozen, so its running statistics stay"),
    pytest.mark.filterwarnings("ignore:.*nn.utils.weight_norm.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:no gradient reached"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A sample of the cases, or all of them; steps beside it of one case for each architecture."""
    cases = list(all_cases()) if metafunc.config.getoption("all_combinations") else sampled_cases()
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=str)
    if "step" in metafunc.fixturenames:
        steps = {case.architecture: case for case in cases if case.micro_batches > 1}
        metafunc.parametrize("step", steps.values(), ids=str)


def test_a_window_does_what_the_joint_backward_does(case: Case) -> None:
    assert_contract(case)


def test_a_step_moves_the_weights_by_the_joint_gradient(step: Case) -> None:
    assert_step(step)


def test_each_pair_of_values_that_can_meet_does() -> None:
    chosen = sampled_cases()
    assert {pair for case in chosen for pair in pairs(case)} == {p for c in all_cases() for p in pairs(c)}
    assert len(chosen) == len(set(chosen)) < 600
