"""Checkpoints of what is spread over the ranks: each writes its parts, and any number of ranks reads them."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal_states
from pool import Pool
from ranked import batch, raised, tree

from mtaccum import ConfigError, Engine
from mtaccum.parallel import current_ranks, shard, whole
from mtaccum.structure import map_tensors
from mtaccum.training import find_checkpoint, load_checkpoint, save_checkpoint


def stepped(steps: int = 1) -> dict[str, Any]:
    """The state of a training that is spread over the ranks."""
    model = tree()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, optimizer)
    for index in range(steps):
        engine.step([batch(index)])
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"steps": steps}}


def saved(folder: str, steps: int = 1) -> dict[str, Any]:
    state = stepped(steps)
    save_checkpoint(state, Path(folder) / "last.pt", current_ranks())
    return map_tensors(state, whole, strict=False)


def assert_holds(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal_states(found["model"], expected["model"])
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert list(found["optimizer"]["state"]) == list(expected["optimizer"]["state"])
    for index, entry in expected["optimizer"]["state"].items():
        assert_equal_states(found["optimizer"]["state"][index], entry)
    assert found["progress"] == expected["progress"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_writes_its_parts_under_the_bare_models_names(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    expected, *_ = pool.run(saved, str(tmp_path), ranks=ranks)

    assert_holds(load_checkpoint(find_checkpoint(tmp_path)), expected)
    assert list(load_checkpoint(tmp_path / "last.pt")["model"]) == list(tree().state_dict())
    (folder,) = tmp_path.glob("last-*.shards")
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, "last.pt"]
    parts = [f"__{rank}_0.distcp" for rank in range(ranks)]
    assert sorted(p.name for p in folder.iterdir()) == [".metadata", *parts]
    sizes = [(folder / part).stat().st_size for part in parts]
    assert max(sizes) < 0.7 * sum(sizes)
    file = torch.load(tmp_path / "last.pt", weights_only=True)
    parameters = dict(tree().named_parameters())
    for name, value in file["model"].items():
        assert value.is_meta == (name in parameters), name


def everywhere(folder: str) -> dict[str, Any]:
    return load_checkpoint(Path(folder) / "last.pt")


def test_any_number_of_ranks_reads_all_of_it(pool: Pool, tmp_path: Path) -> None:
    expected, *_ = pool.run(saved, str(tmp_path))

    for found in pool.run(everywhere, str(tmp_path), ranks=3):
        assert_holds(found, expected)


def test_a_folder_is_moved_with_its_file_and_goes_when_the_next_is_whole(pool: Pool, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    (run / "last-0.shards").mkdir()  # as a killed process leaves it
    (run / "best-0.shards").mkdir()  # another state's
    pool.run(saved, str(run))
    (first,) = run.glob("last-*.shards")
    expected, *_ = pool.run(saved, str(run), 2)
    (second,) = run.glob("last-*.shards")
    assert first != second
    assert (run / "best-0.shards").exists()
    run.rename(moved)

    assert_holds(load_checkpoint(moved / "last.pt"), expected)
    save_checkpoint({"model": {"w": torch.zeros(2)}}, moved / "last.pt")  # gone on with by one process
    assert not list(moved.glob("last-*.shards"))
    assert torch.equal(load_checkpoint(moved / "last.pt")["model"]["w"], torch.zeros(2))


def test_a_folder_that_is_missing_or_damaged_is_named(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path))
    (folder,) = tmp_path.glob("last-*.shards")
    part = folder / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"can't read the tensors in .*\.shards: "):
        load_checkpoint(tmp_path / "last.pt")
    (folder / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"can't read the tensors in .*\.shards: "):
        load_checkpoint(tmp_path / "last.pt")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"they belong into {folder.name} beside it"):
        load_checkpoint(tmp_path / "last.pt")


def full_on_the_second(folder: str) -> str:
    """A real failure to write: one rank may not make files of more than a few bytes."""
    state = stepped(2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if not current_ranks().first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        return raised(save_checkpoint, state, Path(folder) / "last.pt", current_ranks())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_on_one_rank_is_said_by_all_and_leaves_the_previous_state(
    pool: Pool, tmp_path: Path
) -> None:
    expected, *_ = pool.run(saved, str(tmp_path))
    there = sorted(os.listdir(tmp_path))

    for error in pool.run(full_on_the_second, str(tmp_path)):
        assert error.startswith("OSError: can't write ")
        assert "is the disk full? (rank 1: " in error
        assert "rank 0" not in error

    assert sorted(os.listdir(tmp_path)) == there
    assert_holds(load_checkpoint(tmp_path / "last.pt"), expected)
