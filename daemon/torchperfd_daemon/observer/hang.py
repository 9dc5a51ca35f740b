"""Finds the rank that causes a stall, from the stacks of all ranks of a run on this node."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.diagnosis.detect import Stall
from torchperfd_daemon.diagnosis.detect.stall import MIN_ELSEWHERE_SECONDS
from torchperfd_daemon.stacks import Merged, Outcome, RankStacks, merge
from torchperfd_daemon.stacks.activity import Kind, activity
from torchperfd_daemon.stacks.report import sentence

_SAVING: Final = ("torch/serialization.py", "safetensors/torch.py")
_SAVERS: Final = "torch/distributed/checkpoint/"
# Functions with these names do not train, even if no phase was measured in them.
_ASIDE: Final = re.compile(r"_*(save|eval|valid|test|export|checkpoint)", re.IGNORECASE)
_NO_STEP: Final = re.compile(r"^no step for \d+ s")
_STEP_AHEAD: Final = "is ahead of the others"


def find_culprit(run: str, ranks: Sequence[RankStacks], stall: Stall, run_ranks: int) -> Verdict | None:
    """Return the verdict on a stall; None while the stacks do not show a hang.

    A run hangs if ranks wait in a collective, in backward or for data, or if a rank is stopped or gone. The
    culprit is the rank that does not wait where most of the others do. If two ranks wait in different places,
    it is the one that is a step ahead, since it has skipped a collective. During the first ten minutes there
    is no verdict if no rank waits, or if the rank that the others wait for saves or validates: the script may
    do this on purpose. If all ranks of this node wait for each other and the run has ranks elsewhere, the
    verdict is left to the daemon of the culprit's node.

    Args:
        ranks: The stacks of the ranks on this node.
        stall: The stall during which the stacks were read.
        run_ranks: The number of ranks of the run on all nodes.
    """
    merged = merge(ranks)
    patient = stall.waited_seconds < MIN_ELSEWHERE_SECONDS
    gone = [rank for rank in merged.without_stacks if rank.outcome in (Outcome.STOPPED, Outcome.GONE)]
    waits = [group for group in merged.groups if _waits(group.activity.kind, run_ranks)]
    if not ranks or merged.goes_on or (patient and not gone and not waits):
        return None
    culprits = _culprits(ranks, merged, gone)
    if patient and any(_is_aside(rank) for rank in culprits):
        return None
    if not culprits and run_ranks > len(ranks):
        return None
    words = f"no step for {stall.waited_seconds:.0f} s: {sentence(merged)}"
    first = culprits[0] if culprits else None
    if first is not None and first.rank not in merged.odd and len(ranks) > 1:
        words += f"; rank {first.rank} {_STEP_AHEAD}"
    command = f"torchperfd stacks --run {shlex.quote(run)}"
    node, number, phase = (first.node, first.rank, first.phase) if first else (ranks[0].node, None, "")
    return Verdict(
        Cause.HANG, run, node, number, phase, words, 0.0, command, stalled_seconds=stall.waited_seconds
    )


def lasting(hang: Verdict, seconds: float) -> Verdict:
    """Return the verdict on a hang, updated to its present length in seconds."""
    words = _NO_STEP.sub(f"no step for {seconds:.0f} s", hang.evidence)
    return replace(hang, evidence=words, stalled_seconds=seconds)


def _waits(kind: Kind, run_ranks: int) -> bool:
    return kind in (Kind.COLLECTIVE, Kind.DATA) or (kind is Kind.BACKWARD and run_ranks > 1)


def _culprits(ranks: Sequence[RankStacks], merged: Merged, gone: Sequence[RankStacks]) -> list[RankStacks]:
    """Return the culprits, the likeliest first; empty if all ranks are alike."""
    if len(ranks) == 1:
        return list(ranks)
    if gone:
        # A rank that has finished explains a hang less than one that has died.
        return sorted(gone, key=lambda rank: (rank.reason == "it has finished", rank.rank))
    odd = [rank for rank in ranks if rank.rank in merged.odd]
    if odd:
        # A rank that waits itself is less likely to be the cause than one that works.
        return sorted(odd, key=lambda rank: (_is_waiting(rank), rank.rank))
    steps = {rank.step for rank in ranks if rank.step is not None}
    ahead = [rank for rank in ranks if rank.step is not None and rank.step == max(steps)]
    return ahead if len(steps) > 1 and 2 * len(ahead) <= len(ranks) else []


def _is_waiting(rank: RankStacks) -> bool:
    training = rank.training
    return (
        training is not None
        and bool(training.frames)
        and activity(training.frames).kind in (Kind.COLLECTIVE, Kind.BACKWARD)
    )


def _is_aside(rank: RankStacks) -> bool:
    """Return whether a rank saves or validates, by the names of its files and functions."""
    training = rank.training
    return training is not None and any(
        frame.file.endswith(_SAVING) or _SAVERS in frame.file or _ASIDE.match(frame.function)
        for frame in training.frames
    )
