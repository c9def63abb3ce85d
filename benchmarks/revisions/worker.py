"""A process that runs cases on one revision, the one on PYTHONPATH, and writes down what it sees."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import os
import sys
import traceback
import warnings
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

import mtaccum
from revisions import names
from revisions.check_cases import check_cases
from revisions.observe import FAILED, Case, observe
from revisions.rank_cases import rank_cases
from revisions.run import RANKS
from revisions.single_cases import single_cases
from revisions.times import serve

_PATIENCE_S = 120.0  # in one communication


def main() -> None:
    arguments = _arguments()
    found = Path(mtaccum.__file__).resolve().parents[1]
    assert found == arguments.package.resolve(), f"imported mtaccum from {found}"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()  # of skipped steps
    names.alias_modules()
    if arguments.what == "times":
        serve()
    elif arguments.what == "single":
        chosen = arguments.architectures, arguments.quick
        _write(chain(single_cases(*chosen), check_cases(*chosen)), arguments)
    else:
        _on_ranks(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["single", "ranks", "times"])
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--architectures", nargs="*")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    return parser.parse_args()


def _write(cases: Iterable[Case], arguments: argparse.Namespace) -> None:
    """A line for each case that is asked for, as soon as it has run."""
    gc.freeze()  # what was imported need not be looked through before each case
    end = f", rank {arguments.rank}" if arguments.what == "ranks" else ""
    with arguments.output.open("w", encoding="utf-8") as output:
        for case in _chosen(cases, arguments.only, arguments.share):
            seen = observe(case, arguments.rank)
            print(json.dumps([case.kind, case.name + end, seen]), file=output, flush=True)
            if FAILED in seen and end:  # the other rank may be anywhere
                sys.exit(f"{case.kind}: {case.name}{end}: {seen[FAILED]}")


def _chosen(cases: Iterable[Case], only: list[str] | None, share: str) -> Iterator[Case]:
    """Those whose kind and name hold one of some texts, and of these one process's share. Cases that begin
    alike, with an architecture's name say, stay together."""
    number, of = map(int, share.split("/"))
    for case in cases:
        wanted = only is None or any(text in f"{case.kind}: {case.name}" for text in only)
        if wanted and zlib.crc32(case.name.split(", ")[0].encode()) % of == number:
            yield case


def _on_ranks(arguments: argparse.Namespace) -> None:
    """It doesn't return: gloo's threads may outlast what they hold."""
    code = 1
    try:
        _join(arguments.store, arguments.rank)
        _write(rank_cases(arguments.architectures, arguments.quick), arguments)
        code = 0
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _join(store: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=_PATIENCE_S),
    )


if __name__ == "__main__":
    main()
