"""The doctor: what on this node keeps training from being as fast as it could be.

Its findings are written here, as text for people, and as a document for programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from torchperfd.document.blocks import Document, Sentences
from torchperfd_daemon.doctor.checks import Finding, examine
from torchperfd_daemon.doctor.facts import Facts, ReportedFacts
from torchperfd_daemon.doctor.reading import read_facts

__all__ = [
    "SCHEMA",
    "Facts",
    "Finding",
    "ReportedFacts",
    "examine",
    "findings_document",
    "read_facts",
    "to_dict",
]

SCHEMA: Final = "torchperfd.doctor/1"


def to_dict(findings: Sequence[Finding], skipped: Mapping[str, str]) -> dict[str, Any]:
    """Return the versioned document: findings, and what could not be looked at."""
    return {
        "schema": SCHEMA,
        "findings": [asdict(finding) for finding in findings],
        "skipped": [{"check": check, "reason": reason} for check, reason in skipped.items()],
    }


def findings_document(findings: Sequence[Finding], skipped: Mapping[str, str]) -> Document:
    """Return a line per finding: what, why it matters, and what mends it."""
    lines = [f"{each.subject}: {each.problem}; {each.why}. Fix: {each.fix}" for each in findings]
    not_looked_at = [f"not looked at: {check}: {reason}" for check, reason in skipped.items()]
    return Document([[Sentences([*(lines or ["nothing found"]), *not_looked_at])]])
