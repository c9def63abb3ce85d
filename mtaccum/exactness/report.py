"""What a check of exactness found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        kind: what it is about, in a word or two: ``count``, ``in-place``, ``coupled samples`` ...
        where: the node, module, parameter or task that it is about.
        message: what is wrong or worth knowing, and the way out.
        fault: whether the contract doesn't hold for it; otherwise it is a note.
    """

    kind: str
    where: str
    message: str
    fault: bool = True

    def __str__(self) -> str:
        return f"{'fault' if self.fault else 'note'} ({self.kind}) {self.where}: {self.message}"


@dataclass(frozen=True)
class ExactnessReport:
    """The outcome of ``check_exactness``.

    Attributes:
        schedule: the schedule that was compared with the joint backward.
        samples: of each micro-batch, as compared.
        differences: for each node ||gradient - reference|| / ||reference|| over all its parameters.
        bounds: what each difference may be.
        alive: while a node's forward ran, how many other heads' graphs were alive (those of its group
            aside), and the bytes that all graphs kept for their backwards.
        findings: faults first.
    """

    schedule: str
    samples: Sequence[int]
    differences: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    alive: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()

    @property
    def exact(self) -> bool:
        """Whether the contract holds."""
        return not any(finding.fault for finding in self.findings)

    def __str__(self) -> str:
        cut = "+".join(map(str, self.samples))
        lines = [f"compared {self.schedule} with the joint backward on {cut} samples (K={len(self.samples)})"]
        if self.differences:
            width = max(len("node"), *map(len, self.differences))
            lines += ["", f"{'node':<{width}}  difference  bound    other heads' graphs, bytes kept"]
        for node, difference in self.differences.items():
            heads, kept = self.alive.get(node, (0, 0))
            lines.append(
                f"{node:<{width}}  {difference:<10.1e}  {self.bounds[node]:<7.0e}  {heads}, {kept:,} B"
            )
        if self.findings:
            lines += ["", *map(str, self.findings)]
        verdict = "exact: the contract holds" if self.exact else "not exact: see the faults above"
        return "\n".join([*lines, "", verdict])
