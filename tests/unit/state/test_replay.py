"""Replay: what runs twice sees and changes the same as if it had run once."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import RandomState, assert_equal_states, seed_everything
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mtaccum.state import RandomState as Generators
from mtaccum.state import Replay, not_learning, swapped_buffers


def draw() -> list[float]:
    """A number from each generator that a forward may use."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random(), torch.randint(0, 99, ()).item()]


def fail_after(run: Callable[[], object]) -> None:
    run()
    raise RuntimeError("broken")


LAYERS = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm, cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "instance norm": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)),
    "spectral norm, the older one": lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 3)),
    "rrelu": lambda: nn.RReLU(),
    "dropout": lambda: nn.Dropout2d(0.5),
    "nested": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(0.5))),
}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("known", [True, False], ids=["module given", "module found by its call"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_repeat_gives_the_same_output_and_moves_nothing_s1(kind: str, known: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]().train()
    x = torch.rand(3, 4, 6, 6)
    start = buffers_of(layer)
    replay = Replay()

    with replay.first(layer if known else None):
        first = layer(x).detach().clone()
    after, state = buffers_of(layer), RandomState()
    objects = {name: id(buffer) for name, buffer in layer.named_buffers()}
    for _ in range(2):
        with replay.repeat():
            again = layer(x)
        assert torch.equal(again, first)
        assert_equal_states(buffers_of(layer), after)
        assert RandomState() == state

    assert {name: id(buffer) for name, buffer in layer.named_buffers()} == objects
    if start:
        assert any(not torch.equal(start[name], after[name]) for name in start), (
            "the first pass must move them"
        )


def test_a_repeat_draws_the_same_numbers_from_every_generator_s3() -> None:
    seed_everything(0)
    random.seed(0)
    replay = Replay()
    with replay.first():
        first = draw()
    between = draw()
    with replay.repeat():
        assert draw() == first
    after = draw()

    seed_everything(0)
    random.seed(0)
    assert [draw(), draw(), draw()] == [first, between, after]


def test_what_other_passes_changed_meanwhile_is_kept() -> None:
    norm = nn.BatchNorm1d(2)
    replay, x = Replay(), torch.rand(5, 2)
    with replay.first(norm):
        norm(x)
    norm(x)
    now = buffers_of(norm)
    with replay.repeat():
        assert norm.num_batches_tracked.item() == 0
        norm(x)
        assert norm.num_batches_tracked.item() == 1
    assert_equal_states(buffers_of(norm), now)
    assert norm.num_batches_tracked.item() == 2


@pytest.mark.parametrize("known", [True, False])
def test_an_error_in_either_pass_puts_everything_back(known: bool) -> None:
    norm, replay = nn.BatchNorm1d(2), Replay()
    hooks = dict(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(RuntimeError, match="broken"), replay.first(norm if known else None):
        fail_after(lambda: norm(torch.rand(5, 2)))
    assert nn.modules.module._global_forward_pre_hooks == hooks
    after, state, own = buffers_of(norm), RandomState(), random.getstate()
    with pytest.raises(RuntimeError, match="broken"), replay.repeat():
        fail_after(lambda: (norm(torch.rand(5, 2)), draw()))
    assert_equal_states(buffers_of(norm), after)
    assert RandomState() == state
    assert random.getstate() == own


def test_without_a_module_only_what_is_called_is_remembered() -> None:
    called, other, replay = nn.BatchNorm1d(2), nn.BatchNorm1d(2), Replay()
    with replay.first():
        called(torch.rand(5, 2))
    with replay.repeat():
        called(torch.rand(5, 2))
        other(torch.rand(5, 2))
    assert called.num_batches_tracked.item() == 1
    assert other.num_batches_tracked.item() == 1


def test_a_graph_made_on_throwaway_buffers_can_go_backward_afterwards() -> None:
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    x, replay = torch.rand(3, 4), Replay()
    with replay.first(layer):
        layer(x).sum().backward()
    expected = layer.parametrizations.weight.original.grad.clone()
    layer.zero_grad()
    with replay.repeat():
        output = layer(x)
    output.sum().backward()
    assert torch.equal(layer.parametrizations.weight.original.grad, expected)


def test_in_the_backward_the_repeats_buffers_are_worked_on() -> None:
    norm, replay, x = nn.BatchNorm1d(2), Replay(), torch.rand(5, 2)
    with replay.first(norm):
        norm(x)
    now = buffers_of(norm)
    with replay.repeat():
        norm(x)
    with replay.in_backward():
        assert norm.num_batches_tracked.item() == 1
        norm(x)
    with replay.in_backward():
        assert norm.num_batches_tracked.item() == 2
    assert_equal_states(buffers_of(norm), now)


def test_a_repeat_before_the_first_pass_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="repeat before first"), Replay().repeat():
        pass


def test_swapped_buffers_are_worked_on_and_leave_no_trace() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("nothing", None)
    mine = norm.running_mean
    values = {"running_mean": torch.full((2,), 7.0)}
    with swapped_buffers([(norm, values)]):
        assert norm.running_mean.tolist() == [7.0, 7.0]
        norm(torch.rand(5, 2))
    assert norm.running_mean is mine
    assert mine.tolist() == [0.0, 0.0]
    assert values["running_mean"].tolist() != [7.0, 7.0]
    assert norm.nothing is None


# --- not learning -----------------------------------------------------------------------------------------


@pytest.fixture
def head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_a_module_that_is_not_learning_passes_gradients_on_b3(head: nn.Sequential) -> None:
    head[2].bias.requires_grad_(False)
    x = torch.rand(5, 3, requires_grad=True)
    before = buffers_of(head)
    with not_learning(head):
        loss = head(x).pow(2).sum()
    loss.backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in head.parameters())
    assert_equal_states(buffers_of(head), before)
    assert [parameter.requires_grad for parameter in head.parameters()] == [True] * 5 + [False]


def test_its_gradient_to_the_input_is_the_usual_one_b3(head: nn.Sequential) -> None:
    gradients = []
    for freeze in (False, True):
        x = torch.linspace(0, 1, 15).reshape(5, 3).requires_grad_()
        if freeze:
            with not_learning(head):
                loss = F.softplus(head(x)).sum()
        else:
            loss = F.softplus(head(x)).sum()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_an_error_inside_not_learning_puts_everything_back(head: nn.Sequential) -> None:
    before = buffers_of(head)
    with pytest.raises(RuntimeError, match="broken"), not_learning(head):
        fail_after(lambda: head(torch.rand(5, 3)))
    assert all(parameter.requires_grad for parameter in head.parameters())
    assert_equal_states(buffers_of(head), before)


@pytest.mark.parametrize(
    "take",
    [
        lambda: torch.rand(1),
        lambda: F.dropout(torch.ones(3)),
        lambda: np.random.rand(),
        lambda: np.random.rand(312),  # once around: the position is the same again
        lambda: np.random.standard_normal(),
        lambda: random.random(),
        lambda: random.gauss(),
    ],
)
def test_a_state_knows_whether_something_was_drawn_since(take: Callable[[], object]) -> None:
    np.random.standard_normal()  # the next one is in store already
    state = Generators()
    assert state.is_current()
    torch.ones(3).exp()
    assert state.is_current()
    take()
    assert not state.is_current()
    state.restore()
    assert state.is_current()
