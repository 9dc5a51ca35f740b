"""The messages of verdicts, and of the percentiles that are shown beside them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.diagnosis.fixes import fix_of
from torchperfd_daemon.diagnosis.verdict import working_command
from torchperfd_daemon.service.fields import pack
from torchperfd_daemon.service.translate_stacks import slow_line_message
from torchperfd_daemon.store import Rank, StepColumns


def verdict_on_ranks(verdict: Verdict, ranks: Sequence[Rank]) -> control_pb2.Verdict:
    """Pack the verdict on a run; its command works in the present state of the run's ranks."""
    command = working_command(
        verdict.next_command,
        is_over=all(rank.has_ended for rank in ranks),
        has_cuda=any(rank.totals.cuda is not None for rank in ranks),
    )
    return verdict_message(replace(verdict, next_command=command))


def verdict_message(verdict: Verdict) -> control_pb2.Verdict:
    """Pack a verdict."""
    return pack(
        control_pb2.Verdict,
        verdict,
        cause=verdict.cause.value,
        rank=-1 if verdict.rank is None else verdict.rank,
        summary=verdict.summary,
        fix=fix_of(verdict),
        stages=pack(session_pb2.InputStages, verdict.stages) if verdict.stages else None,
        line=slow_line_message(verdict.line) if verdict.line else None,
        others=[verdict_message(other) for other in verdict.others],
    )


def percentiles(steps: StepColumns) -> list[control_pb2.PhasePercentiles]:
    """Return the percentiles of steps and of their phases; none without steps."""
    if not len(steps.duration_ns):
        return []
    columns = np.array([steps.duration_ns, *steps.phases.values()])
    # In one call: each costs more than its content.
    medians, highest = np.percentile(columns, (50, 95), axis=1)
    return [
        control_pb2.PhasePercentiles(phase=name, p50_ns=int(p50), p95_ns=int(p95))
        for name, p50, p95 in zip(("", *steps.phases), medians, highest, strict=True)
    ]
