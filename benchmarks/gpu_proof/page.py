"""The page of results, docs/gpu-results.md, from the JSON files of all cards."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_proof.checks import CHECKS
from benchmarks.gpu_proof.outcome import Outcome

LEFT_OUT: Final = ("agrees", "only torchperfd", "under 2% of the step")
"""Last cells of rows that the page only counts."""

MAX_VALUES: Final = 4
"""Most values that a line of several subjects repeats."""

_CLAIM: Final = re.compile(r"(?P<subject>[^:]+): (?P<claim>.+?)(?:(?:; | \()(?P<value>.+?)\)?)?")

PAGE: Final = Path(__file__).parents[2] / "docs" / "gpu-results.md"

_HEAD: Final = """# Results on GPUs

Written by `make gpu-proof` on a machine with a GPU; do not edit. Each section is one card. **Not met** marks
what did not hold, and **not shown** what that machine could not show. `benchmarks/gpu_proof/results` has
all values.

Not shown by any of these results, because each machine had one GPU: NCCL between ranks, NVLink traffic, MIG
instances, GPUs that are lost or throttled by heat, ROCm, and other operating systems."""


def write(results: Path) -> None:
    PAGE.write_text(text(json.loads(path.read_text()) for path in sorted(results.glob("*.json"))))


def text(documents: Iterator[Mapping[str, Any]]) -> str:
    lines = [_HEAD]
    for document in documents:
        machine = document["machine"]
        lines += ["", f"## {machine['device']}"]
        versions = f"torch {machine['torch']}, CUDA {machine['cuda']}, Python {machine['python']}"
        lines += ["", f"{versions}, {document['date']}."]
        for result in document["checks"].values():
            lines += ["", *check_lines(result)]
        missing = [name for name in CHECKS if name not in document["checks"]]
        if missing:
            lines += ["", f"**Not shown**, since not run on this card: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def check_lines(result: Mapping[str, Any]) -> list[str]:
    """Return one check's section."""
    lines = [f"### {result['title']}", ""]
    if "error" in result:
        return [*lines, f"**Not met**: the check ended early, {result['error']}."]
    outcome = Outcome.from_json(result["outcome"])
    rows = [row for row in outcome.rows if row[-1] not in LEFT_OUT]
    if rows:
        lines += [_row(outcome.columns), f"|{'---|' * len(outcome.columns)}", *map(_row, rows), ""]
    if left_out := Counter(row[-1] for row in outcome.rows if row[-1] in LEFT_OUT):
        lines += [f"Rows left out: {', '.join(f'{count} ({why})' for why, count in left_out.items())}.", ""]
    if outcome.bounds:
        met = sum(bound.held is True for bound in outcome.bounds)
        lines += [f"{met} of {len(outcome.bounds)} limits are met."]
        not_met = grouped(bound.text for bound in outcome.bounds if bound.held is False)
        not_shown = grouped(bound.text for bound in outcome.bounds if bound.held is None)
        rest = [
            *(f"- **Not met**: {text}" for text in not_met),
            *(f"- **Not shown**: {text}" for text in not_shown),
        ]
        lines += ["", *rest] if rest else []
    if outcome.notes:
        lines += ["", *grouped(outcome.notes)] if outcome.bounds else grouped(outcome.notes)
    return lines


def grouped(texts: Iterable[str]) -> list[str]:
    """Join texts that make the same claim, as in ``a (1), b (2): it holds``."""
    by_claim: dict[str, list[tuple[str, str, str]]] = {}
    for text in texts:
        found = _CLAIM.fullmatch(text)
        claim, subject, value = found.group("claim", "subject", "value") if found else (text, "", "")
        by_claim.setdefault(claim, []).append((subject, value, text))
    return [
        members[0][2] if len(members) == 1 else f"{', '.join(_subjects(members))}: {claim}"
        for claim, members in by_claim.items()
    ]


def _subjects(members: list[tuple[str, str, str]]) -> list[str]:
    """Return the subjects of one claim, with their values unless they are many: the table has those."""
    with_values = len(members) <= MAX_VALUES
    return [f"{subject} ({value})" if value and with_values else subject for subject, value, _ in members]


def is_fine(result: Mapping[str, Any]) -> bool:
    """Whether a check ran, and nothing failed to hold."""
    return "outcome" in result and all(
        bound.held is not False for bound in Outcome.from_json(result["outcome"]).bounds
    )


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
