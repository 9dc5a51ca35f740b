"""The doctor: what on this node keeps training from being as fast as it could be.

Its findings are written here, as text for people, and as a document for programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TextIO

from torchperfd_daemon.doctor.checks import Finding, examine
from torchperfd_daemon.doctor.facts import Facts, ReportedFacts
from torchperfd_daemon.doctor.reading import read_facts

__all__ = ["SCHEMA", "Facts", "Finding", "ReportedFacts", "examine", "read_facts", "render_text", "to_dict"]

SCHEMA: Final = "torchperfd.doctor/1"


def to_dict(findings: Sequence[Finding], skipped: Mapping[str, str]) -> dict[str, Any]:
    """Return the versioned document: findings, and what could not be looked at."""
    return {
        "schema": SCHEMA,
        "findings": [asdict(finding) for finding in findings],
        "skipped": [{"check": check, "reason": reason} for check, reason in skipped.items()],
    }


def render_text(findings: Sequence[Finding], skipped: Mapping[str, str], out: TextIO) -> None:
    """Write a line per finding: what, why it matters, and what mends it."""
    for finding in findings:
        out.write(f"{finding.subject}: {finding.problem}; {finding.why}. Fix: {finding.fix}\n")
    if not findings:
        out.write("nothing found\n")
    for check, reason in skipped.items():
        out.write(f"not looked at: {check}: {reason}\n")
