"""Two revisions of the package side by side: does code that was moved still do the same, bit for bit?

    python benchmarks/compare_revisions.py HEAD~3

runs the same cases on both, schedules x options x architectures, on one process and on two ranks, and
compares gradients, buffers, random states, parameters after steps, peak bytes, FLOPs and collectives. Each
difference is named, and the exit code is then 1. Host time is reported as a ratio, and decides nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from revisions.kept import keep, kept_file
from revisions.report import compare, differences_text, read, tables
from revisions.run import ROOT, Side, checked_out, copied_cases, observe_alone, observe_on_ranks
from revisions.times import compare_times


def main() -> None:
    arguments = _arguments()
    # by an exception, so that worktrees are taken away
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: terminated"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = copied_cases(folder / "cases")
        with (
            checked_out(arguments.base, folder / "base") as base,
            checked_out(arguments.head, folder / "head") as head,
        ):
            sys.exit(_compare(Side("base", base, cases), Side("head", head, cases), folder, arguments))


def _compare(base: Side, head: Side, folder: Path, arguments: argparse.Namespace) -> int:
    _observe(base, head, folder, arguments)
    seen = read(base.written), read(head.written)
    every = compare(*seen)
    differences = [difference for difference in every if difference.of not in arguments.allow]
    if differences:
        print(differences_text(differences, arguments.all), end="\n\n")
    print(tables(*seen, every))
    failures = [*base.failures, *head.failures]
    if arguments.rounds and not failures:
        print(f"\n{compare_times([base, head], arguments.rounds)}")
    cases = len({(difference.kind, difference.case) for difference in differences})
    outcome = f"Cases that differ: {cases}." if cases else "Nothing differs."
    print("", *failures, outcome if any(seen) else "No case was run.", sep="\n")
    return 1 if failures or differences or not any(seen) else 0


def _observe(base: Side, head: Side, folder: Path, arguments: argparse.Namespace) -> None:
    more = ["--quick"] if arguments.quick else []
    for option in ("architectures", "only"):
        if (given := getattr(arguments, option)) is not None:
            more += [f"--{option}", *given]
    kept = None
    if arguments.keep is not None:
        chosen = [*more, *map(str, arguments.ranks)]
        kept = kept_file(arguments.keep, arguments.base, base.cases, chosen)
    sides = [base, head]
    if kept is not None and kept.exists():
        base.written, sides = [kept], [head]
    if 1 in arguments.ranks:
        observe_alone(sides, folder, more, processes=max(1, (os.cpu_count() or 1) // len(sides)))
    if 2 in arguments.ranks and not any(side.failures for side in sides):
        observe_on_ranks(sides, folder, more)
    if kept is not None and base in sides:
        keep(base, kept)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="a revision, or a folder with the package in it")
    parser.add_argument("--head", default=str(ROOT), help="the same; this working tree if not given")
    parser.add_argument("--quick", action="store_true", help="fewer combinations, in about a minute")
    parser.add_argument("--architectures", nargs="*", help="only these of tests/architectures.py")
    parser.add_argument("--only", nargs="*", help="only cases whose kind and name, as printed, hold these")
    parser.add_argument(
        "--ranks", nargs="+", type=int, choices=[1, 2], default=[1, 2], help="both by default"
    )
    parser.add_argument("--allow", nargs="*", default=[], help="quantities, as in the table, that may differ")
    parser.add_argument("--all", action="store_true", help="show every difference")
    parser.add_argument("--rounds", type=int, default=20, help="of timing; 0: don't time")
    parser.add_argument("--keep", type=Path, help="folder to keep what the base does, for the next time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
