"""Profile and search: what a chain would need, and the cheapest way through it, against all ways."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import pytest
import torch
from architectures import Made, Scored
from torch import Tensor, nn

from mtaccum import MultiTaskModel, Neck, StepOptions
from mtaccum.memory import FakeTraining
from mtaccum.planning.profile import Candidate, Chain, Level
from mtaccum.planning.profile import Made as Storage
from mtaccum.planning.search import Branch, Share
from mtaccum.planning.watcher import Profile, profile_of

N = 8


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def training_of(build: Callable[[], MultiTaskModel], **batch: Tensor) -> FakeTraining:
    return FakeTraining(build, batch or {"x": torch.rand(N, 4)}, build_optimizer=sgd)


def profiled(build: Callable[[], MultiTaskModel], **batch: Tensor) -> Profile:
    return profile_of(training_of(build, **batch))


# --- profile -----------------------------------------------------------------------------------------------


def two_layers(*more: nn.Module) -> MultiTaskModel:
    trunk = nn.Sequential(nn.Linear(4, 16), nn.Sigmoid(), nn.Linear(16, 8), *more)
    return MultiTaskModel(trunk, {"a": Scored(nn.Linear(8, 2))}, inputs="x")


def test_a_chain_knows_what_its_node_keeps_and_costs() -> None:
    profile = profiled(two_layers)
    assert set(profile.chains) == {"trunk", "a"}
    chain = profile.chains["trunk"]
    kept = [made.nbytes for made in chain.made if made.kept]
    assert sorted(kept) == [N * 8 * 4, N * 16 * 4], "the features, and the result of the sigmoid"
    assert chain.kept_bytes == sum(kept) == chain.kept_before()[-1]
    assert chain.kept_before()[0] == 0
    assert [made.nbytes for made in chain.made if made.is_feature] == [N * 8 * 4]
    assert chain.total_flops == 2 * N * (4 * 16 + 16 * 8)
    assert profile.gradient_bytes == 4 * (4 * 16 + 16 + 16 * 8 + 8 + 8 * 2 + 2)
    assert not chain.draws


def test_candidates_are_modules_and_runs_of_children() -> None:
    names = {candidate.name for candidate in profiled(two_layers).chains["trunk"].candidates}
    assert names == {"trunk", "trunk[0:2]", "trunk[1:3]", "trunk.0", "trunk.1", "trunk.2"}
    assert {c.name for c in profiled(two_layers).chains["a"].candidates} == {"a"}


def test_candidates_of_a_neck_have_its_name() -> None:
    def build() -> MultiTaskModel:
        return MultiTaskModel(
            nn.Linear(4, 8),
            {"a": Scored(nn.Linear(8, 2), on="fpn")},
            inputs="x",
            necks={"fpn": Neck(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))},
        )

    chains = profiled(build).chains
    assert {candidate.name for candidate in chains["fpn"].candidates} == {"fpn", "fpn.0", "fpn.1"}


def test_each_candidate_can_be_recomputed() -> None:
    training = training_of(lambda: two_layers(nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.GELU())))
    for chain in profile_of(training).chains.values():
        assert chain.candidates
        for candidate in chain.candidates:
            training.predict(StepOptions(recompute=(candidate.name,)))


def test_a_module_that_runs_twice_is_no_candidate() -> None:
    def build() -> MultiTaskModel:
        shared = Made(lambda self, x: self.b(self.a(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 8))
        return MultiTaskModel(shared, {"a": Scored(nn.Linear(8, 2))}, inputs="x")

    assert {c.name for c in profiled(build).chains["trunk"].candidates} == {"trunk", "trunk.b"}


def test_a_module_shared_by_two_nodes_is_no_candidate() -> None:
    def build() -> MultiTaskModel:
        layer = nn.Linear(8, 8)
        heads = {
            "a": Scored(nn.Sequential(layer, nn.Tanh())),
            "b": Scored(nn.Sequential(layer, nn.Linear(8, 1))),
        }
        return MultiTaskModel(nn.Linear(4, 8), heads, inputs="x")

    chains = profiled(build).chains
    assert {c.name for c in chains["a"].candidates} == {"a", "a.1"}
    assert {c.name for c in chains["b"].candidates} == {"b", "b.1"}


def test_what_is_written_into_its_inputs_is_no_candidate_by_itself() -> None:
    def build() -> MultiTaskModel:
        trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 8))
        return MultiTaskModel(trunk, {"a": Scored(nn.Linear(8, 2))}, inputs="x")

    names = {candidate.name for candidate in profiled(build).chains["trunk"].candidates}
    assert "trunk.1" not in names, "it writes into what it is given"
    assert "trunk[1:3]" not in names
    assert {"trunk.0", "trunk[0:2]", "trunk", "trunk.2", "trunk[2:4]"} <= names


@pytest.mark.parametrize(
    ("layer", "draws"),
    [(nn.Dropout(0.5), True), (nn.Dropout(0.0), False), (nn.RReLU(), True), (nn.BatchNorm1d(8), False)],
)
def test_a_chain_knows_whether_it_draws_random_numbers(layer: nn.Module, draws: bool) -> None:
    chains = profiled(lambda: two_layers(layer)).chains
    assert chains["trunk"].draws is draws
    assert not chains["a"].draws


def test_tasks_without_labels_have_no_chain() -> None:
    def build() -> MultiTaskModel:
        heads = {"a": Scored(nn.Linear(4, 2)), "b": Scored(nn.Linear(4, 2), target="b")}
        return MultiTaskModel(nn.Linear(4, 4), heads, inputs="x")

    assert set(profiled(build).chains) == {"trunk", "a"}


# --- search on chains that are made up ----------------------------------------------------------------------


def random_chain(seed: int, positions: int) -> Chain:
    """Storages of any lifetime; any run of positions can be recomputed."""
    dice = random.Random(seed)
    chain = Chain("trunk")
    for at in range(positions):
        chain.add_position()
        chain.flops[at] = dice.randint(1, 100)
        for _ in range(dice.randint(1, 2)):
            uses = sorted(dice.sample(range(at, positions), k=min(2, positions - at)))
            storage = Storage(at, dice.randint(100, 1000), uses, kept=dice.random() < 0.7)
            chain.made.append(storage)
            chain.moved_bytes[at] += storage.nbytes
    chain.made[-1].kept = chain.made[-1].is_feature = True
    kept = chain.kept_before()
    for at in range(positions):
        chain.forward[at] = Level(kept[at] + dice.randint(200, 2000), 50)
        chain.backward[at] = Level(kept[at] + dice.randint(200, 2000), 50)
    chain.candidates = [
        Candidate(f"{start}:{stop}", start, stop)
        for start in range(positions)
        for stop in range(start + 1, positions + 1)
        if dice.random() < 0.8
    ]
    return chain


def sets_of_parts(candidates: Sequence[Candidate], position: int = 0) -> Iterator[list[Candidate]]:
    """All sets of parts that don't overlap and lie behind a position."""
    yield []
    for first in candidates:
        if first.start >= position:
            behind = [other for other in candidates if other.start > first.start]
            for rest in sets_of_parts(behind, first.stop):
                yield [first, *rest]


def with_parts(chain: Chain, parts: list[Candidate]) -> Chain:
    """The chain where nothing else can be recomputed."""
    fewer = copy.copy(chain)
    fewer.candidates = parts
    return fewer


def steps_between(branch: Branch, number: int) -> list[float]:
    """Bytes from what it needs at least to what it needs without recomputing."""
    least, most = branch.least().needed_bytes, branch.cheapest().needed_bytes
    return [least + i * (most - least) / (number - 1) for i in range(number)]


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_the_cheapest_of_all_ways_through_a_chain(seed: int) -> None:
    chain, share = random_chain(seed, positions=3 + seed % 3), Share()
    branch = Branch(chain, (), share)
    ways = [Branch(with_parts(chain, parts), (), share) for parts in sets_of_parts(chain.candidates)]
    assert len(ways) > 1
    for available in steps_between(branch, 6):
        found = branch.best(available)
        assert found is not None
        assert found.needed_bytes <= available
        others = [choice for way in ways if (choice := way.best(available)) is not None]
        assert found.cost == pytest.approx(min(choice.cost for choice in others))
        assert any(
            other.recompute == found.recompute and other.needed_bytes == pytest.approx(found.needed_bytes)
            for other in others
        ), "it needs what it says"
    least = branch.least().needed_bytes
    assert least <= 1.002 * min(way.least().needed_bytes for way in ways)
    assert branch.best(0.99 * least) is None
    assert branch.cheapest() == branch.best(float("inf"))
    assert branch.cheapest().recompute == ()


def test_a_part_costs_what_runs_twice_and_what_it_writes() -> None:
    chain = random_chain(4, 5)
    for candidate in chain.candidates:
        choice = Branch(with_parts(chain, [candidate]), (), Share()).least()
        if choice.recompute:
            run = slice(candidate.start, candidate.stop)
            assert choice.recompute == (candidate.name,)
            assert choice.cost == sum(chain.flops[run]) + sum(chain.moved_bytes[run])


@pytest.mark.parametrize("seed", range(10))
def test_children_run_one_after_the_other_in_what_their_parent_leaves(seed: int) -> None:
    trunk, heads = random_chain(seed, 4), [random_chain(100 * seed + i, 3) for i in (1, 2)]
    share = Share()
    children = [Branch(head, (), share) for head in heads]
    branch = Branch(trunk, children, share)
    assert branch.cheapest().cost == 0
    costs = []
    for available in steps_between(branch, 6):
        found = branch.best(available)
        assert found is not None
        assert found.needed_bytes <= available
        costs.append(found.cost)
        # no way through the trunk, with the best of each head in what it leaves, is cheaper
        for parts in sets_of_parts(trunk.candidates):
            own = Branch(with_parts(trunk, parts), (), share).best(available)
            if own is None:
                continue
            left = available - own.kept_bytes
            below = [[c.cost for c in child.tradeoffs() if c.needed_bytes <= left] for child in children]
            if all(below):
                assert found.cost <= own.cost + sum(map(min, below)) + 1e-9
    assert costs == sorted(costs, reverse=True), "more memory never costs more"


def test_tradeoffs_go_from_the_cheapest_to_the_least() -> None:
    branch = Branch(random_chain(7, 6), (), Share())
    found = branch.tradeoffs()
    assert found[0] == branch.cheapest()
    assert found[-1] == branch.least()
    assert [choice.cost for choice in found] == sorted(choice.cost for choice in found)
    needed = [choice.needed_bytes for choice in found]
    assert needed == sorted(needed, reverse=True)


def test_half_the_samples_need_half_of_what_grows() -> None:
    chain = random_chain(3, 5)
    for level in (*chain.forward, *chain.backward):
        level.fixed = 0
    whole, half = (Branch(chain, (), Share(samples)).cheapest().needed_bytes for samples in (1.0, 0.5))
    assert half == pytest.approx(whole / 2)
    assert Branch(chain, (), Share(1.0, fixed_bytes=10_000)).cheapest().needed_bytes == pytest.approx(
        whole + 10_000
    )


def test_a_head_is_cut_no_finer_than_needed() -> None:
    chain = random_chain(3, 5)
    chain.candidates = []
    branch = Branch(chain, (), Share(), chunks=(1, 2, 4, 8))
    whole = branch.cheapest()
    assert whole.chunks == ()
    needed = [branch.best(part * whole.needed_bytes) for part in (0.99, 0.4)]
    numbers = [dict(choice.chunks)["trunk"] for choice in needed if choice is not None]
    assert len(numbers) == 2
    assert 1 < numbers[0] < numbers[1]


def test_what_is_left_behind_has_to_fit_too() -> None:
    """A chain that keeps more than any moment in it needs, by itself."""
    chain = Chain("trunk")
    for at, nbytes in enumerate((1000, 2000)):
        chain.add_position()
        chain.made.append(Storage(at, nbytes, [at], kept=True))
    branch = Branch(chain, (), Share())
    assert branch.cheapest().needed_bytes == 3000
    assert branch.best(2999) is None
    assert branch.tradeoffs() == [branch.cheapest(), branch.least()]


def test_what_a_part_hands_on_stays_though_it_is_made_where_the_part_begins() -> None:
    chain = Chain("trunk")
    for _ in range(2):
        chain.add_position()
    chain.made = [Storage(0, 1000, [0], kept=True), Storage(0, 300, [1], kept=True)]
    chain.candidates = [Candidate("first", 0, 1)]
    least = Branch(chain, (), Share()).least()
    assert (least.recompute, least.kept_bytes) == (("first",), 300)


def test_parts_that_save_little_are_not_named() -> None:
    chain = random_chain(5, 6)
    some = Branch(chain, (), Share(least_saving_bytes=1)).least()
    none = Branch(chain, (), Share(least_saving_bytes=10**9)).least()
    assert some.recompute
    assert not none.recompute


# --- search against real predictions ------------------------------------------------------------------------


def blocks() -> MultiTaskModel:
    """Three blocks of different size; BatchNorm lets neither K nor chunks be exact."""
    torch.manual_seed(0)

    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.GELU())

    head = nn.Sequential(block(24, 48), nn.Linear(48, 2))
    return MultiTaskModel(
        nn.Sequential(block(4, 48), block(48, 16), block(16, 24)), {"a": Scored(head)}, inputs="x"
    )


def forest_of(trunk: Chain, head: Chain, share: Share) -> Branch:
    below = Branch(trunk, [Branch(head, (), share, trunk.kept_bytes)], share)
    return Branch(Chain("inputs"), [below], share)


def stairs() -> MultiTaskModel:
    """Each layer is wider than the one before, so that a part's second run is where most is alive: what it
    hands on, the gradient that comes back, and what it was given."""
    torch.manual_seed(0)
    widths, layers = (4, 32, 48, 64, 96), []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh(), nn.Sigmoid()]
    return MultiTaskModel(nn.Sequential(*layers), {"a": Scored(nn.Linear(96, 2))}, inputs="x")


# In the second run of the first two there is what they hand on, with its gradient; the other two keep what
# they are given, which nothing else would.
@pytest.mark.parametrize("part", ["trunk[0:10]", "trunk[2:10]", "trunk[1:4]", "trunk[7:10]"])
def test_what_a_part_needs_is_estimated_as_it_is_predicted(part: str) -> None:
    training = training_of(stairs, x=torch.rand(512, 4))
    profile = profile_of(training)
    trunk, head = profile.chains["trunk"], profile.chains["a"]
    trunk.candidates = [candidate for candidate in trunk.candidates if candidate.name == part]
    head.candidates = []
    choice = forest_of(trunk, head, Share(least_saving_bytes=1)).least()
    assert choice.recompute == (part,)
    peak_bytes = training.predict(StepOptions(recompute=(part,))).peak_bytes
    assert choice.needed_bytes == pytest.approx(peak_bytes, rel=0.005)


def overlap(one: Candidate, other: Candidate) -> bool:
    return one.start < other.stop and other.start < one.stop


def test_the_search_is_as_good_as_the_best_of_all_sets_of_blocks() -> None:
    training = training_of(blocks, x=torch.rand(256, 4))
    profile = profile_of(training)
    trunk, head = profile.chains["trunk"], profile.chains["a"]
    share = Share(least_saving_bytes=1)
    forest = forest_of(trunk, head, share)
    in_trunk = [c for c in trunk.candidates if c.name.count(".") + c.name.count("[") <= 1]
    in_head = [c for c in head.candidates if c.name in ("a", "a.0")]
    assert len(in_trunk) == 6
    sets: list[tuple[str, ...]] = []
    for number in range(4):
        for chosen in combinations(in_trunk, number):
            if not any(overlap(one, other) for one, other in combinations(chosen, 2)):
                names = tuple(candidate.name for candidate in chosen)
                sets += [names, *((*names, candidate.name) for candidate in in_head)]
    assert len(sets) > 30
    predicted = [training.predict(StepOptions(recompute=names)) for names in sets]
    flops = training.predict(StepOptions()).flops

    peaks = sorted({prediction.peak_bytes for prediction in predicted})
    for budget in peaks[:: max(1, len(peaks) // 8)]:
        choice = forest.best(budget)
        assert choice is not None
        real = training.predict(StepOptions(recompute=choice.recompute))
        assert real.peak_bytes <= 1.005 * budget
        assert choice.needed_bytes == pytest.approx(real.peak_bytes, rel=0.01)
        best = min(prediction.flops for prediction in predicted if prediction.peak_bytes <= budget)
        assert real.flops <= 1.001 * best
        again = real.flops - flops
        assert again <= choice.cost <= again + sum(trunk.moved_bytes) + sum(head.moved_bytes)
    least = training.predict(StepOptions(recompute=forest.least().recompute)).peak_bytes
    assert least <= 1.002 * peaks[0]
