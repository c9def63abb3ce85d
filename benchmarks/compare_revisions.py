"""Two revisions of the package side by side: does code that was moved still do the same, bit for bit?

    python benchmarks/compare_revisions.py HEAD~3

runs the same cases on both, schedules x options x architectures, on one process and on two ranks, and
compares gradients, buffers, random states, parameters after steps, peak bytes, FLOPs and collectives. Each
difference is named, and the exit code is then 1. Host time is reported as a ratio, and decides nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from revisions.report import compare, differences_text, tables
from revisions.run import ROOT, checked_out, observations
from revisions.times import compare_times


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            checked_out(arguments.base, folder / "base") as base,
            checked_out(arguments.head, folder / "head") as head,
        ):
            sys.exit(_compare(base, head, folder, arguments))


def _compare(base: Path, head: Path, folder: Path, arguments: argparse.Namespace) -> int:
    sides = [("base", base), ("head", head)]
    more = ["--quick"] if arguments.quick else []
    if arguments.architectures is not None:
        more += ["--architectures", *arguments.architectures]
    seen = observations(sides, folder, more)
    differences = compare(*seen)
    if differences:
        print(differences_text(differences, arguments.all), end="\n\n")
    print(tables(*seen, differences))
    if arguments.rounds:
        print(f"\n{compare_times(sides, arguments.rounds)}")
    cases = len({(d.kind, d.case) for d in differences})
    print(f"\n{f'{cases} cases differ.' if cases else 'Nothing differs.'}")
    return 1 if differences else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("base", help="a revision, or a folder with the package in it")
    parser.add_argument("--head", default=str(ROOT), help="the same; this working tree if not given")
    parser.add_argument("--quick", action="store_true", help="fewer combinations, in about a minute")
    parser.add_argument("--architectures", nargs="*", help="only these of tests/architectures.py")
    parser.add_argument("--all", action="store_true", help="show every difference")
    parser.add_argument("--rounds", type=int, default=20, help="of timing; 0: don't time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
