"""Which tests may notice a break: those that come to its line, in an order that finds the one soon.

What tests come to is found by running them once on the intact package, file by file, and kept beside the
benchmarks' results, under a digest of all sources that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from breaks_places import Place, running
from breaks_plugin import function_of
from breaks_reach import FOLDER, PACKAGE, Current, read
from breaks_runs import Copy

_FIRST_S = 3.0  # tests of the first round take so long together
_FIRST_FILES = 4  # and come from so many files, since reading a file takes time too
_PROCESSES_S = 4.0  # starting the processes that some tests run on
_WITH_PROCESSES = ("tests/distributed", "tests/e2e")


@dataclass
class Reach:
    """What is known of tests that run on the intact package.

    Attributes:
        seconds: of each test that passes.
        tests: those that come to a line, by file and line.
        left: further cases of a test, which come to much the same.
        failing: tests that fail.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    left: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    failing: list[str] = field(default_factory=list)

    def at(self, package: Path, lines: Mapping[Path, set[int]]) -> set[str]:
        """Tests that come to one of these lines."""
        names = [(path.relative_to(package.parent).as_posix(), n) for path, ns in lines.items() for n in ns]
        return {test for name in names for test in self.tests.get(name, ())}


def test_files(root: Path, folders: Sequence[str]) -> list[str]:
    """Files of tests in these folders, or these files themselves."""
    files = []
    for folder in map(root.joinpath, folders):
        files += [folder] if folder.is_file() else sorted(folder.rglob("test_*.py"))
    return [file.relative_to(root).as_posix() for file in files]


def starts_processes(test: str) -> bool:
    """Whether a test needs other processes: ranks, or commands."""
    return test.startswith(_WITH_PROCESSES)


def follow(copy: Copy, package: str, files: Sequence[str], kept: Path) -> Reach:
    """What tests of these files come to. What is known already stands in a folder and isn't run again."""
    digest = hashlib.sha256()
    helpers = [path for path in (copy.checkout / "tests").rglob("*.py") if "test_" not in path.name]
    for path in sorted([*(copy.checkout / package).rglob("*.py"), *helpers]):
        digest.update(path.read_bytes())
    reach = Reach()
    for file in files:
        own = hashlib.sha256(digest.digest() + (copy.checkout / file).read_bytes()).hexdigest()[:12]
        record = kept / f"{file.replace('/', '.')}.{own}.json"
        if not record.is_file():
            kept.mkdir(parents=True, exist_ok=True)
            print(f"follows {file}", flush=True)
            record.write_text(json.dumps(_follow(copy, package, file)))
        known = json.loads(record.read_text())
        reach.seconds |= known["seconds"]
        reach.failing += known["failing"]
        for test in known["left"]:
            reach.left[function_of(test)].append(test)
        for name, lines in known["lines"].items():
            for line, numbers in lines.items():
                reach.tests[name, int(line)] |= {known["tests"][str(n)] for n in numbers}
    return reach


def _follow(copy: Copy, package: str, file: str) -> dict[str, object]:
    folder = copy.root / "reach"
    folder.mkdir()
    current = Current(folder)
    try:
        shutil.copy(Path(__file__).with_name("breaks_reach.py"), copy.checkout)
        face = copy.checkout / package / "__init__.py"
        text = f"{face.read_text()}\nimport breaks_reach\nbreaks_reach.follow()\n"
        folders = {FOLDER: str(folder), PACKAGE: str(copy.checkout / package) + os.sep}
        with copy.written(face, text):
            ended = copy.run([file], reach=folders, stop=False)
        root = f"{copy.checkout}{os.sep}"
        lines = {
            path.removeprefix(root).replace(os.sep, "/"): {
                line: sorted(n for n in numbers if ended.numbers.get(n) in ended.passed)
                for line, numbers in found.items()
            }
            for path, found in read(folder).items()
        }
        return {
            "seconds": ended.passed,
            "failing": sorted(ended.failing),
            "left": sorted(ended.left),
            "tests": {n: test for n, test in ended.numbers.items() if test in ended.passed},
            "lines": lines,
        }
    finally:
        current.close()
        shutil.rmtree(folder)


def rounds(reach: Reach, package: Path, path: Path, place: Place, limit_s: float) -> list[dict[str, float]]:
    """Tests that may notice a break in a place, with the seconds they take, together at most ``limit_s``: a
    first round that most breaks don't survive, and the rest. Quick ones come first, and of a test with many
    cases not all at once."""
    tests = reach.at(package, running(package, path, place))
    if not tests:  # lines that run on import only, say
        inside = set(range(*place.body)) if place.body[1] else set(range(len(path.read_text().splitlines())))
        tests = reach.at(package, {path: {line + 1 for line in inside}})
    cases: Counter[str] = Counter()
    costs: dict[str, float] = {}
    seconds = dict(reach.seconds)
    followed = sorted(tests, key=lambda test: (seconds[test], test))
    for test in followed:
        seconds |= dict.fromkeys(reach.left.get(function_of(test), ()), seconds[test])
    left = [case for name in dict.fromkeys(map(function_of, followed)) for case in reach.left.get(name, ())]
    for test in [*followed, *left]:
        name = function_of(test)
        costs[test] = (seconds[test] + 0.02) * (1 + cases[name]) + _PROCESSES_S * starts_processes(name)
        cases[name] += 1
    first: dict[str, float] = {}
    rest: dict[str, float] = {}
    files: set[str] = set()
    for test in sorted(costs, key=lambda test: (costs[test], test)):
        file = test.partition("::")[0]
        if sum(first.values()) < _FIRST_S and (file in files or len(files) < _FIRST_FILES):
            first[test] = seconds[test]
            files.add(file)
        elif sum(first.values()) + sum(rest.values()) + seconds[test] < limit_s:
            rest[test] = seconds[test]
    return [tests for tests in (first, rest) if tests]
