"""Checkpoints of sharded parameters: each rank writes its shards, and any number of ranks reads them."""

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
from torch import Tensor

from mtaccum import ConfigError, Engine
from mtaccum.parallel import current_ranks, full_tensor, shard
from mtaccum.structure import map_tensors
from mtaccum.training import find_checkpoint, load_checkpoint, save_checkpoint


def stepped(steps: int = 1) -> dict[str, Any]:
    """The state of a training whose parameters are sharded."""
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
    return map_tensors(state, full_tensor, strict=False)


def assert_holds(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal_states(found["model"], expected["model"])
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert list(found["optimizer"]["state"]) == list(expected["optimizer"]["state"])
    for index, entry in expected["optimizer"]["state"].items():
        assert_equal_states(found["optimizer"]["state"][index], entry)
    assert found["progress"] == expected["progress"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_writes_its_shards_under_the_bare_models_names(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    expected, *_ = pool.run(saved, str(tmp_path), ranks=ranks)

    assert_holds(load_checkpoint(find_checkpoint(tmp_path)), expected)
    assert list(load_checkpoint(tmp_path / "last.pt")["model"]) == list(tree().state_dict())
    (folder,) = tmp_path.glob("last-*.shards")
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, "last.pt"]
    shards = [f"__{rank}_0.distcp" for rank in range(ranks)]
    assert sorted(p.name for p in folder.iterdir()) == [".metadata", *shards]
    sizes = [(folder / shard).stat().st_size for shard in shards]
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


def shards_in(folder: Path, others: list[str]) -> set[str]:
    """Folders of shards, but for those that are there too."""
    found = {path.name for path in folder.glob("*.shards")}
    assert found >= set(others)
    return found - set(others)


def test_a_folder_is_moved_with_its_file_and_goes_when_the_next_is_whole(pool: Pool, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    (run / "last-00000000.shards").mkdir()  # as a killed process leaves it
    others = ["best-00000000.shards", "last-best-00000000.shards", "last-mine.shards"]  # other states'
    for other in others:
        (run / other).mkdir()
    pool.run(saved, str(run))
    (first,) = shards_in(run, others)
    expected, *_ = pool.run(saved, str(run), 2)
    (second,) = shards_in(run, others)
    assert first != second
    run.rename(moved)

    assert_holds(load_checkpoint(moved / "last.pt"), expected)
    save_checkpoint({"model": {"w": torch.zeros(2)}}, moved / "last.pt")  # gone on with by one process
    assert not shards_in(moved, others)
    assert torch.equal(load_checkpoint(moved / "last.pt")["model"]["w"], torch.zeros(2))


def test_a_folder_that_is_missing_or_damaged_is_named(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved, str(tmp_path))
    (folder,) = tmp_path.glob("last-*.shards")
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"can't read the tensors in .*\.shards: "):
        load_checkpoint(tmp_path / "last.pt")
    (folder / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"can't read the tensors in .*\.shards: "):
        load_checkpoint(tmp_path / "last.pt")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"they belong into {folder.name} beside it"):
        load_checkpoint(tmp_path / "last.pt")


def saved_and_read_by_one(folder: str) -> list[str] | None:
    """Right after it was saved, one rank reads it by itself."""
    save_checkpoint(stepped(), Path(folder) / "last.pt", current_ranks())
    if current_ranks().is_rank_zero:
        return None
    return list(load_checkpoint(Path(folder) / "last.pt")["model"])


def test_a_state_is_there_on_all_ranks_once_it_is_saved_and_one_may_read_it(
    pool: Pool, tmp_path: Path
) -> None:
    for _ in range(3):
        assert pool.run(saved_and_read_by_one, str(tmp_path)) == [None, list(tree().state_dict())]


def in_lists(folder: str) -> Tensor:
    model = tree()
    shard(model)
    weight = model.state_dict()["trunk.conv.weight"]
    save_checkpoint({"list": [1, (weight, "b")]}, Path(folder) / "last.pt", current_ranks())
    return full_tensor(weight)


def test_dtensors_in_lists_are_full_tensors_again(pool: Pool, tmp_path: Path) -> None:
    expected, *_ = pool.run(in_lists, str(tmp_path))
    one, (weight, word) = load_checkpoint(tmp_path / "last.pt")["list"]
    assert (one, word) == (1, "b")
    assert torch.equal(weight, expected)


def no_file(folder: str) -> str:
    """Rank 0 can't put its file there."""
    return raised(save_checkpoint, stepped(), Path(folder) / "last.pt", current_ranks())


def test_a_file_that_rank_0_cant_write_is_said_by_all(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "last.pt.partial").mkdir()
    first, second = pool.run(no_file, str(tmp_path))
    assert first.startswith(("OSError: ", "IsADirectoryError: "))
    assert second.startswith("OSError: rank 0: ")
    assert not list(tmp_path.glob("last-*.shards"))


def full_on_the_second(folder: str) -> str:
    """A real failure to write: one rank may not make files of more than a few bytes."""
    state = stepped(2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if not current_ranks().is_rank_zero:
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


def interrupted_on_the_second(folder: str) -> str:
    """Ctrl-C while one rank writes."""
    state = stepped()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.default_int_handler)
    try:
        if not current_ranks().is_rank_zero:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        return raised(save_checkpoint, state, Path(folder) / "last.pt", current_ranks())
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_ctrl_c_while_shards_are_written_is_no_full_disk(pool: Pool, tmp_path: Path) -> None:
    expected, *_ = pool.run(saved, str(tmp_path))

    assert pool.run(interrupted_on_the_second, str(tmp_path)) == ["KeyboardInterrupt"] * 2

    assert_holds(load_checkpoint(tmp_path / "last.pt"), expected)
