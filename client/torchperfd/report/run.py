"""The ``torchperfd.run/1`` document: names and units that scripts depend on. Fields are only added."""

from typing import Any, Final

from torchperfd.report.rank import RankReport

RUN_SCHEMA: Final = "torchperfd.run/1"


def run_document(run: str, ranks: list[RankReport], verdict: dict[str, Any] | None) -> dict[str, Any]:
    """Return the document that ``torchperfd run --report`` writes.

    Args:
        run: Name of the run.
        ranks: In any order.
        verdict: As ``torchperfd diagnose --json`` gives it; None without a daemon.
    """
    return {
        "schema": RUN_SCHEMA,
        "run": run,
        "ranks": [rank.to_dict() for rank in sorted(ranks, key=lambda rank: rank.rank)],
        "verdict": verdict,
    }
