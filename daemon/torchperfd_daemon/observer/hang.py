"""Whose fault a stall is, read off the stacks of all ranks of a run on this node."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.diagnosis.detect import Stall
from torchperfd_daemon.diagnosis.detect.stall import LEAST_ELSEWHERE_SECONDS
from torchperfd_daemon.stacks import Merged, Outcome, RankStacks, merge
from torchperfd_daemon.stacks.activity import Kind, activity
from torchperfd_daemon.stacks.report import sentence

_SAVING: Final = ("torch/serialization.py", "safetensors/torch.py")
_SAVERS: Final = "torch/distributed/checkpoint/"
# What is named so is not training, even where nothing of it could be measured.
_ASIDE: Final = re.compile(r"_*(save|eval|valid|test|export|checkpoint)", re.IGNORECASE)
_NO_STEP: Final = re.compile(r"^no step for \d+ s")
_STEP_AHEAD: Final = "is ahead of the others"


def find_culprit(run: str, ranks: Sequence[RankStacks], stall: Stall, run_ranks: int) -> Verdict | None:
    """Return the verdict on a stall; None while the stacks do not show one.

    A hang shows in ranks that wait for what does not come: in a collective, in a backward, for data; or in a
    rank that is stopped or gone. Named is who is not waiting where most of the others do; of two that wait in
    different places, who is a step ahead, since it has left a collective out. Where nobody waits, or where
    who has the others wait saves or validates, the script may have its reasons: for ten minutes that is
    no hang.
    If all ranks of this node wait for each other and there are more elsewhere, the culprit's node tells.

    Args:
        run: Its name.
        ranks: What is known of the ranks on this node.
        stall: What the stacks were asked for.
        run_ranks: How many ranks the run has on all nodes.
    """
    merged = merge(ranks)
    patient = stall.waited_seconds < LEAST_ELSEWHERE_SECONDS
    gone = [rank for rank in merged.untold if rank.outcome in (Outcome.STOPPED, Outcome.GONE)]
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
    """Return the verdict on a hang that has lasted for so many seconds by now."""
    words = _NO_STEP.sub(f"no step for {seconds:.0f} s", hang.evidence)
    return replace(hang, evidence=words, stalled_seconds=seconds)


def _waits(kind: Kind, run_ranks: int) -> bool:
    return kind in (Kind.COLLECTIVE, Kind.DATA) or (kind is Kind.BACKWARD and run_ranks > 1)


def _culprits(ranks: Sequence[RankStacks], merged: Merged, gone: Sequence[RankStacks]) -> list[RankStacks]:
    """Return who is to blame, the likeliest first; nobody if all ranks are alike."""
    if len(ranks) == 1:
        return list(ranks)
    if gone:
        # A rank that has finished explains a hang less than one that has died.
        return sorted(gone, key=lambda rank: (rank.reason == "it has finished", rank.rank))
    odd = [rank for rank in ranks if rank.rank in merged.odd]
    if odd:
        # Who waits itself is more likely a victim than who works.
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
    """Return whether a rank saves or validates, as far as the names of its functions say."""
    training = rank.training
    return training is not None and any(
        frame.file.endswith(_SAVING) or _SAVERS in frame.file or _ASIDE.match(frame.function)
        for frame in training.frames
    )
