"""A process that runs cases on one revision, the one on PYTHONPATH, and writes down what it sees."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import mtaccum
from revisions import names
from revisions.observe import observe
from revisions.rank_cases import RANKS, rank_cases
from revisions.single_cases import single_cases

PATIENCE_S = 60.0  # in one communication


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["single", "ranks", "times"])
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--architectures", nargs="*", default=None)
    parser.add_argument("--store", type=Path, default=None)
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    found = Path(mtaccum.__file__).resolve().parents[1]
    assert found == arguments.package.resolve(), f"imported mtaccum from {found}"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()  # of skipped steps
    names.alias_modules()
    if arguments.what == "times":
        from revisions.times import serve

        serve()
        return
    if arguments.what == "single":
        cases = single_cases(arguments.architectures, arguments.quick)
    else:
        _join(arguments.store, arguments.rank)
        cases = rank_cases(arguments.quick)
    gc.freeze()
    with arguments.output.open("w", encoding="utf-8") as output:
        for case in cases:
            seen = observe(case, arguments.rank)
            name = f"{case.name}, rank {arguments.rank}" if arguments.what == "ranks" else case.name
            print(json.dumps([case.kind, name, seen]), file=output, flush=True)
    if dist.is_initialized():
        os._exit(0)  # gloo's threads may outlast what they hold


def _join(store: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )


if __name__ == "__main__":
    main()
