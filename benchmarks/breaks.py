"""Drawn one-line breaks of the package, and the tests that notice them.

    python benchmarks/breaks.py engine=70 exactness=25  # draws, and records the test that notices each
    python benchmarks/breaks.py parallel=+12            # 12 more than are recorded, from today's sources
    python benchmarks/breaks.py --again                 # makes the recorded breaks once more
    python benchmarks/breaks.py --unnoticed             # those that nothing noticed, after tests were added

A record keeps what was broken as function and statement, so that it is found again in files that have moved.
Words that were renamed since are given in ``tests/breaks_renames.json``, old to new. A break that was noticed
must be noticed again: by the same test, or else by one of those that come to the line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from breaks_order import Reach, follow, rounds, starts_processes, test_files
from breaks_places import Break, Place, applied, draw, find, in_other_words, translated
from breaks_plugin import function_of
from breaks_runs import Copy, warm

_LIMIT_S = 90.0  # of tests that pass on a broken package; then it counts as not noticed
_TESTS = ("tests/unit", "tests/distributed")


@dataclass
class Session:
    """A copy to break, and what its tests come to, once somebody asks for it."""

    copy: Copy
    package: str
    files: Sequence[str]
    kept: Path
    limit_s: float = _LIMIT_S
    _reach: Reach | None = None

    @property
    def folder(self) -> Path:
        return self.copy.checkout / self.package

    @property
    def reach(self) -> Reach:
        if self._reach is None:
            self._reach = follow(self.copy, self.package, self.files, self.kept)
            for test in self._reach.failing:
                print(f"left out, since it fails on the intact package: {test}")
        return self._reach

    def noticed(self, made: Break, path: Path, place: Place) -> Break:
        """A break with the first test that fails on it."""
        broken = applied(path.read_text(encoding="utf-8"), place, made.broken_statement)
        tried: set[str] = set()
        for tests in rounds(self.reach, self.folder, path, place, self.limit_s):
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            with self.copy.written(path, broken):
                ended = self.copy.run(files, list(tests), tests)
            # ranks also fail where a busy machine lets them wait too long
            by = ended.failed
            if by is not None and (not starts_processes(by) or by in self.passing([by])):
                return replace(made, noticed_by=by, tried=[])
            tried |= {test.partition("::")[0] for test in ended.passed}
        return replace(made, noticed_by=None, tried=sorted(tried))

    def passing(self, tests: Collection[str]) -> set[str]:
        """Those of some tests that pass on the intact package; with all cases, where its own is gone."""
        if not tests:
            return set()
        files = sorted({test.partition("::")[0] for test in tests})
        ended = self.copy.run(files, sorted(tests), stop=False)
        some = {function_of(test) for test in ended.passed} - {function_of(test) for test in ended.failing}
        return {test for test in tests if test in ended.passed or function_of(test) in some}

    def failed(self, made: Break, path: Path, place: Place, test: str) -> str | None:
        """The test, if it fails on a break."""
        with self.copy.written(path, applied(path.read_text(encoding="utf-8"), place, made.broken_statement)):
            return self.copy.run([test.partition("::")[0]], [test]).failed


def draw_and_record(session: Session, counts: Mapping[str, str], seed: int, records: Path) -> int:
    """Draw breaks, and append a record of each that hasn't one."""
    known = {made.id: made for made in recorded(records)}
    for part, number in counts.items():
        for made in drawn(session.folder, part, number, seed, list(known.values())):
            if (old := known.get(made.id)) is not None:
                same = (old.file, old.line, old.broken_line) == (made.file, made.line, made.broken_line)
                if not same:
                    sys.exit(
                        f"{made.id} was drawn from other sources or with another seed. To make it once more "
                        f"give --again; to draw others, {part}=+{number}"
                    )
                continue
            found = find(session.folder, made)
            assert found is not None, made
            started = time.monotonic()
            made = session.noticed(made, *found)
            with records.open("a") as file:
                print(json.dumps(made.as_dict()), file=file)
            show(made, made.noticed_by or "noticed by nothing", time.monotonic() - started)
    return 0


def drawn(package: Path, part: str, number: str, seed: int, known: Sequence[Break]) -> list[Break]:
    """So many breaks of a part; with a plus so many that aren't recorded, numbered on from those that are."""
    if not number.startswith("+"):
        return draw(package, part, int(number), seed)
    old = [made for made in known if made.id.startswith(f"{part}-")]
    have = {(made.function, made.statement, made.broken_statement) for made in old}
    found = draw(package, part, int(number) + len(old), seed)
    more = [made for made in found if (made.function, made.statement, made.broken_statement) not in have]
    return [
        replace(made, id=f"{part}-{len(old) + index:03}") for index, made in enumerate(more[: int(number)])
    ]


def again(session: Session, records: Path, words: Mapping[str, str], only: Sequence[str]) -> int:
    """Make the recorded breaks that were noticed once more; 1 if one isn't noticed."""
    count = {"noticed again": 0, "not found any more": 0, "NOT noticed": 0}
    noticed = [made for made in chosen(records, only) if made.noticed_by]
    root = session.copy.checkout
    tests = {made.id: still_there(root, made.noticed_by or "", session.files, words) for made in noticed}
    passing = session.passing({test for test in tests.values() if test})
    for made in noticed:
        started = time.monotonic()
        now, found = place_of(session.folder, made, words)
        if found is None:
            result, what = "not found any more", f"{made.statement}, in {made.function}"
        else:
            test = tests[made.id]
            is_file = test is not None and "::" not in test  # which fails when it is imported
            by = session.failed(now, *found, test) if test and (is_file or test in passing) else None
            by = by or session.noticed(now, *found).noticed_by
            result = "noticed again" if by else "NOT noticed"
            what = by or f"{now.statement} -> {now.broken_statement}, in {found[0].name}"
        count[result] += 1
        show(made, f"{result}: {what}", time.monotonic() - started)
    print(", ".join(f"{number} {what}" for what, number in count.items()))
    return int(count["NOT noticed"] > 0)


def retry(session: Session, records: Path, words: Mapping[str, str], only: Sequence[str]) -> int:
    """Run the tests once more on recorded breaks that none noticed, and record what does now."""
    for made in chosen(records, only):
        if made.noticed_by is not None or made.equivalent is not None:
            continue
        started = time.monotonic()
        now, found = place_of(session.folder, made, words)
        if found is None:
            show(made, f"not found any more: {now.statement}, in {now.function}", 0.0)
            continue
        by = session.noticed(now, *found)
        new = replace(made, noticed_by=by.noticed_by, tried=sorted({*made.tried, *by.tried}))
        new = new if new.noticed_by is None else replace(new, tried=[])
        rest = [new if other.id == made.id else other for other in recorded(records)]
        records.write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in rest))
        show(made, new.noticed_by or "noticed by nothing", time.monotonic() - started)
    return 0


def chosen(records: Path, only: Sequence[str]) -> list[Break]:
    """Recorded breaks whose ids begin like one of these, if there are any."""
    return [made for made in recorded(records) if made.id.startswith(tuple(only) or "")]


def place_of(package: Path, made: Break, words: Mapping[str, str]) -> tuple[Break, tuple[Path, Place] | None]:
    """A break as it reads now, and where it is."""
    for version in (made, translated(made, words)):
        if (found := find(package, version)) is not None:
            return version, found
    return made, None


def still_there(root: Path, test: str, files: Sequence[str], words: Mapping[str, str]) -> str | None:
    """A test's id now, where it has another name or file; None: there is none of that name."""
    for version in dict.fromkeys((test, in_other_words(test, words))):
        file, _, name = version.partition("::")
        at = [other for other in (file, *files) if (root / other).is_file()]
        if at and not name:
            return at[0]
        if found := [other for other in at if _defines(root / other, name)]:
            return f"{found[0]}::{name}"
    return None


def _defines(file: Path, name: str) -> bool:
    function = name.rpartition("::")[2].partition("[")[0]
    return bool(name) and f"def {function}(" in file.read_text(encoding="utf-8")


def recorded(records: Path) -> list[Break]:
    """All breaks in a file of records, one to a line."""
    if not records.is_file():
        return []
    return [Break(**json.loads(line)) for line in records.read_text(encoding="utf-8").splitlines()]


def show(made: Break, what: str, seconds: float) -> None:
    print(f"{made.id} {seconds:5.1f} s  {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", help="engine=70, engine=+5: so many breaks of that part; --again: ids begin so"
    )
    parser.add_argument("--again", action="store_true", help="make the recorded breaks once more")
    parser.add_argument("--unnoticed", action="store_true", help="try those that nothing noticed once more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    parser.add_argument("--package", default="mtaccum")
    parser.add_argument("--records", type=Path, help="default: tests/breaks.jsonl")
    parser.add_argument("--tests", nargs="+", default=_TESTS, help="folders and files of tests")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds of tests for a break")
    given = parser.parse_args()
    records = given.records or given.root / "tests" / "breaks.jsonl"
    renames = given.root / "tests" / "breaks_renames.json"
    words = json.loads(renames.read_text(encoding="utf-8")) if renames.is_file() else {}
    files = test_files(given.root, given.tests)
    kept = given.root / "benchmarks" / "results" / "breaks"
    warm(given.root, given.package, ["tests"])
    copy = Copy(given.root)
    try:
        session = Session(copy, given.package, files, kept, given.limit)
        if given.again:
            return again(session, records, words, given.parts)
        if given.unnoticed:
            return retry(session, records, words, given.parts)
        counts = {part: number for part, _, number in (p.partition("=") for p in given.parts)}
        return draw_and_record(session, counts, given.seed, records)
    finally:
        copy.close()


if __name__ == "__main__":
    sys.exit(main())
