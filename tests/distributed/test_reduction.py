"""What goes between ranks, and when: gradients once per step, and small agreements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import SCHEDULE_NAMES, Squared, assert_equal_states, joint_reference, plain_batch, plain_model
from pool import Pool
from ranked import (
    KINDS,
    assert_equal_gradients,
    assert_same_result,
    engine_of,
    full_gradients,
    full_parameters,
    made,
    raised,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mtaccum import Engine, MultiTaskModel, Task, reduce_gradients, split_backward, windows
from mtaccum.data import MicroBatchSampler
from mtaccum.engine import options
from mtaccum.parallel import current_ranks, in_step, shard
from mtaccum.parallel.ddp import COMM_HOOKS

kinds = pytest.mark.parametrize("kind", KINDS)


def plain(*samples: int, missing: float = 0.5) -> list[Any]:
    return [plain_batch(number, seed=7 * number + i, missing=missing) for i, number in enumerate(samples)]


# --- how much ----------------------------------------------------------------------------------------------


def reduced_bytes(tasks: int, micro_batches: int) -> tuple[int, int, int, int]:
    """Bytes reduced in the second of two steps, those of the gradients, in how many tensors they came, and
    how often a hook was registered."""
    torch.manual_seed(0)
    heads = {f"t{i}": Squared(nn.Linear(8, 3 + i)) for i in range(tasks)}
    model = MultiTaskModel(nn.Linear(3, 8), heads, inputs="x").double()
    sizes: list[int] = []

    def counting(_state, bucket):  # type: ignore[no-untyped-def]  # PyTorch refuses annotations in quotes
        sizes.append(bucket.buffer().nbytes)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    registered: list[Any] = []
    register = DistributedDataParallel.register_comm_hook

    def counted(self: DistributedDataParallel, state: Any, hook: Any) -> None:
        registered.append(hook)
        register(self, state, hook)

    rounding, COMM_HOOKS["fp16"] = COMM_HOOKS["fp16"], counting
    DistributedDataParallel.register_comm_hook = counted  # type: ignore[method-assign]
    try:
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), comm_hook="fp16")
        for _ in range(2):
            sizes.clear()
            engine.step(plain(*[2] * micro_batches))
    finally:
        COMM_HOOKS["fp16"] = rounding
        DistributedDataParallel.register_comm_hook = register  # type: ignore[method-assign]
    return sum(sizes), sum(p.nbytes for p in model.parameters()), len(sizes), len(registered)


def test_each_gradient_is_reduced_once_per_step_d2(pool: Pool) -> None:
    for tasks in (1, 4, 8):
        for micro_batches in (1, 4):
            for reduced, gradients, buckets, passes in pool.run(reduced_bytes, tasks, micro_batches):
                assert reduced == gradients, f"{tasks} tasks, {micro_batches} micro-batches"
                assert (buckets, passes) == (1, 1)


class Scattered(TorchDispatchMode):
    """The bytes of each reduction of sharded gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self.sizes.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def scattered_bytes(tasks: int, micro_batches: int, schedule: str) -> tuple[list[int], list[int]]:
    """Bytes of each reduction in a step, and of each node's gradients, in sizes that are not padded."""
    torch.manual_seed(0)
    heads = {f"t{i}": Squared(nn.Linear(8, 4 + 2 * i)) for i in range(tasks)}
    heads["t0"].mode = "detached"
    model = MultiTaskModel(nn.Linear(3, 8), heads, inputs="x").double()
    sizes = [sum(p.nbytes for p in module.parameters()) for module in model.own_modules().values()]
    shard(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    with Scattered() as scattered:
        engine.step(plain(*[2] * micro_batches))
    return scattered.sizes, sizes


def test_each_sharded_gradient_is_reduced_once_per_step_d2(pool: Pool) -> None:
    for tasks, micro_batches in [(2, 1), (2, 4), (4, 3)]:
        for schedule in SCHEDULE_NAMES:
            for reduced, gradients in pool.run(scattered_bytes, tasks, micro_batches, schedule):
                assert sorted(reduced) == sorted(gradients), (tasks, micro_batches, schedule)


def hooked(hook: str, batches: list[list[Any]]) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    model, seen = plain_model().float(), {}
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        comm_hook=hook,
        on_gradients=lambda m: seen.update(full_gradients(m)),
    )
    engine.step(batches[current_ranks().rank])
    return seen, full_parameters(model)


def test_the_communication_hook_rounds_to_16_bits(pool: Pool) -> None:
    batches = [
        [{k: v.float() if v.is_floating_point() else v for k, v in b.items()} for b in window]
        for window in (plain(3), plain(2, 4))
    ]
    exact = pool.run(hooked, "none", batches)[0][0]

    (one, parameters), (_, others) = pool.run(hooked, "fp16", batches)

    assert_equal_states(parameters, others)
    assert_equal_gradients(one, exact, 2**-10)
    assert any(not torch.equal(one[name], exact[name]) for name in one)


def test_each_hook_that_is_an_option_is_there() -> None:
    assert set(COMM_HOOKS) == set(options.COMM_HOOKS)


def bad_hooks() -> list[str]:
    model = plain_model()
    return [raised(Engine, model, comm_hook=hook) for hook in ("bf16", "fp8")]


def test_other_communication_hooks_are_refused_at_once(pool: Pool) -> None:
    for on_the_cpu, unknown in pool.run(bad_hooks):
        assert on_the_cpu.startswith(
            "ConfigError: comm_hook=bf16 works on CUDA only, and the model is on cpu"
        )
        assert unknown.startswith("ConfigError: unknown comm_hook 'fp8'")


# --- loops of the user's own -------------------------------------------------------------------------------


def own_loop(batches: list[list[Any]]) -> list[dict[str, Tensor | None]]:
    """Gradients after two accumulated windows, and after a second round with those of the first dropped."""
    model = plain_model()
    if current_ranks().rank:
        for parameter in model.parameters():
            parameter.data.zero_()
    engine = Engine(model)  # takes over the weights of rank 0
    own, seen = batches[current_ranks().rank], []
    for _ in range(2):
        engine.accumulate(own[:1])
        engine.accumulate(own[1:])
        reduce_gradients(model)
        seen.append(full_gradients(model))
        model.zero_grad()
    return seen


def test_accumulate_and_reduce_gradients_in_a_loop_of_ones_own(pool: Pool) -> None:
    batches = [plain(3, 2, 4), plain(5), []]

    found = pool.run(own_loop, batches, ranks=3)

    model = plain_model()
    first = joint_reference(model, [plain(3, 2, 4)[0], plain(5)[0]]).gradients
    second = joint_reference(model, plain(3, 2, 4)[1:]).gradients
    both = {name: first[name] + second[name] for name in first}  # type: ignore[operator]
    for rounds in found:
        for gradients in rounds:
            assert_equal_gradients(gradients, both)


class Net(nn.Module):
    """Somebody's model: a backbone and two heads, one of which has labels on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        self.double()


def by_split_backward(windows: list[list[Any]]) -> dict[str, Tensor | None]:
    net = Net()
    for batch in windows[current_ranks().rank]:
        a, b = batch["other"], batch.get("value")
        losses = {
            "a": lambda f, y=a: (net.a(f) - y).square().mean(),
            "b": lambda f, y=b: None if y is None else (net.b(f) - y).square().mean(),
        }
        split_backward(net.backbone(batch["x"]), losses)
    reduce_gradients(net)
    return full_gradients(net)


def test_reduce_gradients_after_split_backward(pool: Pool) -> None:
    one, other = plain(4, 4, missing=0.0)
    del other["value"]
    windows = [[one], [other], []]

    found = pool.run(by_split_backward, windows, ranks=3)

    net = Net()  # the mean over the ranks of what each of them has
    features = net.backbone(torch.cat([one["x"], other["x"]]))
    a = (net.a(features) - torch.cat([one["other"], other["other"]])).square().mean() * 2
    b = (net.b(features[:4]) - one["value"]).square().mean()
    ((a + b) / 3).backward()
    reference = full_gradients(net)
    for gradients in found:
        assert_equal_gradients(gradients, reference)


def sparse(both: bool) -> list[str]:
    """An embedding whose sparse gradient one rank has, and that is idle at first."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 2, sparse=True), "dense": nn.Linear(2, 1)})
    errors = []
    for looked_up in (False, True):
        x = torch.ones(1, 2)
        if looked_up and (both or current_ranks().is_rank_zero):
            x = model["table"](torch.tensor([1]))
        model["dense"](x).sum().backward()
        errors.append(raised(reduce_gradients, model))
    return errors


@pytest.mark.parametrize("both", [True, False])
def test_sparse_gradients_are_refused_on_all_ranks(pool: Pool, both: bool) -> None:
    for at_first, error in pool.run(sparse, both):
        assert at_first == "nothing was raised"
        assert error.startswith("ConfigError: a parameter of shape (5, 2) has a sparse gradient")


# --- what is agreed on -------------------------------------------------------------------------------------


def differing(change: str) -> tuple[str, bool]:
    """A step after something was changed on the last rank."""
    model = plain_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before, task = full_parameters(model), model.task("value")
    if current_ranks().rank == current_ranks().world_size - 1:
        if change == "weight":
            task.weight *= 1 + 1e-9
        else:
            task.mode = "off"
    error = raised(engine.step, plain(3))
    return error, all(torch.equal(p, before[name]) for name, p in full_parameters(model).items())


@pytest.mark.parametrize("change", ["weight", "off"])
def test_other_tasks_or_weights_on_a_rank_stop_all(pool: Pool, change: str) -> None:
    found = pool.run(differing, change, ranks=3)

    assert len(set(found)) == 1
    error, unchanged = found[0]
    assert error.startswith(
        "ConfigError: all ranks must train the same tasks in the same order, but rank 0: cls"
    )
    assert "rank 1: cls (weight 1.0), value (weight 0.3), other" in error
    last = "value (weight 0.3000000003)" if change == "weight" else "rank 2: cls (weight 1.0), other"
    assert last in error
    assert unchanged


def seeded_by_rank(kind: str) -> dict[str, Tensor]:
    model = made(lambda: plain_model(seed=current_ranks().rank), kind)
    model.register_buffer("note", torch.full((3,), float(current_ranks().rank)))
    engine_of(kind, model)
    return {**full_parameters(model), "note": model.note}


@kinds
def test_all_start_with_the_weights_of_rank_0(pool: Pool, kind: str) -> None:
    first = dict(plain_model(seed=0).named_parameters())
    for found in pool.run(seeded_by_rank, kind, ranks=3):
        assert_equal_states(found, {**first, "note": torch.zeros(3)})


def by_itself(batches: list[list[Any]]) -> tuple[Any, dict[str, Tensor]]:
    rank = current_ranks().rank
    model = plain_model(seed=rank)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), parallel="none")
    results = [engine.step(batches[rank]) for _ in range(rank + 1)]  # one more on one rank
    return results[0], full_parameters(model)


def test_parallel_none_trains_each_rank_by_itself(pool: Pool) -> None:
    batches = [plain(3), plain(2, 4)]

    for rank, (result, parameters) in enumerate(pool.run(by_itself, batches)):
        model = plain_model(seed=rank)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
        expected = [engine.step(batches[rank]) for _ in range(rank + 1)]
        assert_same_result(result, expected[0])
        assert_equal_states(parameters, dict(model.named_parameters()))


class Uncertain(Task):
    """A loss whose weight is learned; the weight belongs to nobody's module."""

    def __init__(self, head: nn.Module, target: str, log_variance: nn.Parameter) -> None:
        super().__init__(head, target)
        self.log_variance = [log_variance]  # in a list, so that the model doesn't hold it

    def loss(self, prediction: Tensor, batch: Any) -> Tensor:
        (log_variance,) = self.log_variance
        return (prediction - batch[self.target]).square().mean() * (-log_variance).exp() + log_variance


def uncertain(rank: int) -> tuple[MultiTaskModel, list[nn.Parameter]]:
    torch.manual_seed(0)
    learned = [nn.Parameter(torch.tensor(float(rank + i), dtype=torch.float64)) for i in range(2)]
    tasks = {
        "value": Uncertain(nn.Linear(8, 2), "value", learned[0]),
        "other": Uncertain(nn.Linear(8, 1), "other", learned[1]),
    }
    return MultiTaskModel(nn.Linear(3, 8), tasks, inputs="x").double(), learned


def learning_weights(kind: str, batches: list[list[Any]]) -> list[float]:
    model, learned = uncertain(current_ranks().rank)
    made(lambda: model, kind)
    optimizer = torch.optim.SGD([*model.parameters(), *learned], lr=0.1)
    engine = engine_of(kind, model, optimizer, max_grad_norm=0.5)
    for _ in range(2):
        engine.step(batches[current_ranks().rank])
    return [weight.item() for weight in learned]


@kinds
def test_learned_weights_outside_of_the_model_i4(pool: Pool, kind: str) -> None:
    batches = [plain(3, missing=0.0), [{**plain(2, missing=0.0)[0], "value": None}], []]

    found = pool.run(learning_weights, kind, batches, ranks=3)

    model, learned = uncertain(0)
    engine = Engine(model, torch.optim.SGD([*model.parameters(), *learned], lr=0.1), max_grad_norm=0.5)
    for _ in range(2):
        engine.step([*batches[0], *batches[1]])
    assert found[0] == pytest.approx([weight.item() for weight in learned], abs=1e-10)
    assert found[0] == found[1] == found[2]


def frozen_for_a_while(kind: str, schedule: str) -> list[tuple[set[str], dict[str, Tensor]]]:
    """Which parameters move while the trunk doesn't learn, while it does, and so on."""
    model = made(plain_model, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    engine = engine_of(kind, model, optimizer, schedule=schedule)
    seen = []
    for learns in (False, True, False, True):
        model.trunk.requires_grad_(learns)  # type: ignore[union-attr]
        before = full_parameters(model)
        engine.step(plain(3 + current_ranks().rank, missing=0.0))
        after = full_parameters(model)
        seen.append(({name for name in after if not torch.equal(after[name], before[name])}, after))
    return seen


@pytest.mark.parametrize("schedule", ["split", "summed"])
@kinds
def test_what_learns_may_change_between_steps(pool: Pool, kind: str, schedule: str) -> None:
    first, other = pool.run(frozen_for_a_while, kind, schedule)

    trunk = {"trunk.0.weight", "trunk.0.bias"}
    for index, ((moved, after), (_, theirs)) in enumerate(zip(first, other, strict=True)):
        assert moved & trunk == (trunk if index % 2 else set())
        assert moved - trunk == after.keys() - trunk
        assert_equal_states(after, theirs)


def results_in_single_precision(kind: str) -> Any:
    """Of a step in which each rank has labels of other tasks."""
    model = made(lambda: plain_model().float(), kind)
    engine = engine_of(kind, model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = plain(3, missing=0.0)
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    batch["cls" if current_ranks().is_rank_zero else "value"] = None
    return engine.step([batch]), engine.step([])


@kinds
def test_what_a_step_reports_is_the_same_on_all_ranks(pool: Pool, kind: str) -> None:
    found = pool.run(results_in_single_precision, kind)

    for result, empty in found:
        assert_same_result(result, found[0][0])
        assert {loss.dtype for loss in result.losses.values()} == {torch.float32}
        assert not empty.stepped
        assert empty.idle == dict.fromkeys(["cls", "value", "other"], "no labels")


# --- batches -----------------------------------------------------------------------------------------------


def ids_in_step(kind: str) -> list[list[list[int]]]:
    """What each step saw: 4 batches on rank 0, 3 on the others."""
    ranks = current_ranks()
    model, seen = made(plain_model, kind), []
    engine = engine_of(kind, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loader() -> Iterator[dict[str, Any]]:
        for index in range(4 if ranks.is_rank_zero else 3):
            yield {**plain_batch(2, seed=index), "ids": [100 * ranks.rank + index]}

    for window in in_step(windows(loader(), 2)):
        engine.step(window)
        seen.append([batch["ids"] for batch in window])
    for window in in_step(windows([], 2)):
        raise AssertionError(window)
    return seen


@kinds
def test_unequal_numbers_of_batches_d4(pool: Pool, kind: str) -> None:
    first, second = pool.run(ids_in_step, kind)

    assert first == [[[0], [1]], [[2], [3]]]
    assert second == [[[100], [101]], [[102]]]


def tied_up(samples: int) -> list[list[list[int]]]:
    """The windows of an epoch, by the sampler of this rank."""
    ranks = current_ranks()
    sampler = MicroBatchSampler(samples, 4, 2, rank=ranks.rank, ranks=ranks.world_size)
    return list(in_step(windows(iter(sampler), 2)))


@pytest.mark.parametrize("samples", [24, 25, 31])
def test_the_ranks_share_an_epoch_in_the_order_of_one(pool: Pool, samples: int) -> None:
    found = pool.run(tied_up, samples, ranks=3)

    epoch = [sum((sum(w, []) for w in of_ranks), []) for of_ranks in zip(*found, strict=True)]
    assert epoch == list(MicroBatchSampler(samples, 12))
