"""Conversion between the fleet's messages and the daemon's own types, and the merged survey of all nodes.

A merged survey has each rank once, and one verdict on each run. Messages that nodes and processes share are
in ``service.translate``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchperfd.model.formatting import one_line
from torchperfd.model.messages import pack, unpack
from torchperfd.model.totals import Placed
from torchperfd.v1 import contract, control_pb2, fleet_pb2, session_pb2
from torchperfd_daemon.captures.manifest import RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack, Result
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, working_command
from torchperfd_daemon.fleet.transport import PeerError, Unreachable
from torchperfd_daemon.fleet.verdict import NodePart, judge
from torchperfd_daemon.service import translate, translate_diagnosis
from torchperfd_daemon.service.targets import Redact
from torchperfd_daemon.service.translate_verdict import verdict_to_message
from torchperfd_daemon.service.translate_work import comparison_from_messages
from torchperfd_daemon.store.model import HISTORY_STEPS

_CAUSES = {cause.value: cause for cause in Cause}
_MAX_CHARACTERS = 200
_MAX_PHASE_CHARACTERS = 64
_MAX_PHASES = 64
_MAX_OTHERS = 8
_IDENTITY_TEXTS = ("run", "job_name", "node", "script", "torch_version", "python_version")


def api_message() -> session_pb2.ApiRange:
    """Pack the versions of the protocol that this side speaks."""
    return session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX)


def check_version(api: session_pb2.ApiRange) -> None:
    """Make sure that a daemon speaks a version of the protocol that this one speaks too.

    Raises:
        PeerError: It does not.
    """
    if contract.overlapping_api(api.min, api.max) is None:
        raise PeerError(
            f"one side speaks protocol {api.min} to {api.max}, the other {contract.API_MIN} to"
            f" {contract.API_MAX}; install the same version of torchperfd on all nodes"
        )


def unreachable_to_message(own: Unreachable) -> control_pb2.UnreachablePeer:
    return control_pb2.UnreachablePeer(address=str(own.address), reason=own.reason)


def tidy_run(run: control_pb2.Run) -> control_pb2.Run:
    """Return another node's run with its text cleaned of terminal control characters."""
    for rank in run.ranks:
        _tidy_status(rank)
    run.run, run.job_name = clean_line(run.run), clean_line(run.job_name)
    return run


def tidy_survey(survey: fleet_pb2.NodeSurvey) -> fleet_pb2.NodeSurvey:
    """Return another node's survey with invalid values removed or limited.

    Raises:
        PeerError: Its columns are of different lengths.
    """
    survey.node, survey.version = clean_line(survey.node), clean_line(survey.version)
    for rank in survey.ranks:
        _tidy_status(rank.status)
        columns = (rank.end_ns, rank.duration_ns, *(phase.ns for phase in rank.phases))
        if rank.count > HISTORY_STEPS or any(len(column) != 8 * rank.count for column in columns):
            raise PeerError("its steps cannot be read")
        samples = {len(phase.ns) for phase in rank.device_phases}
        if len(samples) > 1 or any(size % 8 or size > 8 * HISTORY_STEPS for size in samples):
            raise PeerError("its steps on devices cannot be read")
        del rank.phases[_MAX_PHASES:], rank.device_phases[_MAX_PHASES:]
        for phase in (*rank.phases, *rank.device_phases):
            phase.phase = one_line(phase.phase, _MAX_PHASE_CHARACTERS)
        rank.block_steps = min(rank.block_steps, HISTORY_STEPS)
    return survey


def verdict_from_message(message: control_pb2.Verdict) -> Verdict:
    """Unpack a node's verdict on a run; a cause that this version has no name for is unknown."""
    cause = _CAUSES.get(message.cause, Cause.UNKNOWN)
    found = unpack(
        message,
        Verdict,
        cause=cause,
        rank=message.rank if message.rank >= 0 else None,
        next_command="",
        onset_step=None,
        others=tuple(
            verdict_from_message(other) for other in message.others[:_MAX_OTHERS] if not other.others
        ),
    )
    if cause is not Cause.HANG:
        return replace(found, stalled_seconds=0.0)
    # An older node sends the duration of a hang as its cost.
    cost = found.cost_seconds_per_step
    return replace(found, cost_seconds_per_step=0.0, stalled_seconds=found.stalled_seconds or cost)


def clean_line(text: str) -> str:
    """Return another node's text as one short line."""
    return one_line(text, _MAX_CHARACTERS)


def _tidy_status(status: control_pb2.RankStatus) -> None:
    for name in _IDENTITY_TEXTS:
        setattr(status.identity, name, clean_line(getattr(status.identity, name)))
    places = unpack(status, Placed).coordinates
    del status.coordinates[:]
    status.coordinates.extend(pack(session_pb2.Coordinate, place) for place in places)
    for name in ("step_seconds", "stalled_seconds", "last_step_unix_seconds"):
        if not math.isfinite(getattr(status, name)):
            setattr(status, name, 0.0)
    for phase, seconds in status.phase_seconds.items():
        if not math.isfinite(seconds):
            status.phase_seconds[phase] = 0.0
    if status.state not in session_pb2.RunState.values():
        status.state = session_pb2.RUN_STATE_UNSPECIFIED


def facts_from_message(status: control_pb2.RankStatus) -> RankFacts:
    """Unpack which process a rank on another node is."""
    places = unpack(status, Placed).coordinates
    return translate.rank_facts(translate.identity_from_message(status.identity), "", uid_of(status), places)


def uid_of(message: control_pb2.RankStatus | control_pb2.RankStacks) -> int | None:
    """Return the user of a rank's process from the daemon of its node; None when that is unknown."""
    return message.uid if message.HasField("uid") else None


def ack_to_report(capture_id: str, rank: int, own: Ack) -> fleet_pb2.TakeReport:
    return fleet_pb2.TakeReport(
        ack=fleet_pb2.TakeAck(
            rank=rank,
            ack=pack(session_pb2.CaptureAck, own, capture_id=capture_id),
        )
    )


def result_to_report(capture_id: str, rank: int, own: Result) -> fleet_pb2.TakeReport:
    return fleet_pb2.TakeReport(
        result=fleet_pb2.TakeResult(
            rank=rank,
            result=pack(session_pb2.CaptureResult, own, capture_id=capture_id),
        )
    )


def each_once(
    surveys: Sequence[fleet_pb2.NodeSurvey],
) -> dict[tuple[str, int], tuple[control_pb2.RankSteps, int]]:
    """Return each rank's steps and the number of the survey they are in, by run and rank.

    A rank that has moved is reported as gone by its old node.
    """
    found: dict[tuple[str, int], tuple[control_pb2.RankSteps, int]] = {}
    for number, survey in enumerate(surveys):
        for steps in survey.ranks:
            key = steps.status.identity.run, steps.status.identity.rank
            known = found.get(key)
            if known is None or _newness(steps) > _newness(known[0]):
                found[key] = steps, number
    return found


def judge_all(surveys: Sequence[fleet_pb2.NodeSurvey], *, at_end: bool = False) -> list[Verdict]:
    """Return one verdict on each run, by name.

    Args:
        at_end: The runs end: the newest steps of ranks that have finished or left count as well.
    """

    def counts(steps: control_pb2.RankSteps) -> bool:
        return steps.count > 0 and (at_end or _is_training(steps))

    there: dict[str, dict[int, list[control_pb2.RankSteps]]] = {}
    for (run, _), (steps, number) in each_once(surveys).items():
        there.setdefault(run, {}).setdefault(number, []).append(steps)
    verdicts = [
        {message.run: verdict_from_message(message) for message in survey.verdicts} for survey in surveys
    ]
    judged = []
    for run, nodes in sorted(there.items()):
        # The verdict of a node whose ranks have all left counts only once all ranks of the run have left.
        training = {
            number
            for number, ranks in nodes.items()
            if at_end or any(each.status.connected for each in ranks)
        }
        numbers = [number for number in sorted(training or nodes) if run in verdicts[number]]
        messages = [each for number in numbers for each in nodes[number] if counts(each)]
        times = comparison_from_messages(messages)
        works = {work.rank: work for work in times.works}
        parts = [
            NodePart(
                surveys[number].node,
                verdicts[number][run],
                tuple(works[each.status.identity.rank] for each in nodes[number] if counts(each)),
            )
            for number in numbers
        ]
        if parts:
            reported = [each for ranks in nodes.values() for each in ranks]
            world = max(each.status.identity.world_size for each in reported)
            missing = max(0, world - len(reported))
            verdict = judge(run, parts, missing, hidden=times.hidden)
            command = working_command(
                verdict.next_command,
                is_over=all(map(_has_ended, reported)),
                has_cuda=any(each.device_phases for each in reported),
            )
            judged.append(replace(verdict, next_command=command))
    return judged


def shown_verdicts(
    surveys: Sequence[fleet_pb2.NodeSurvey], redact: Redact, *, at_end: bool = False
) -> Iterator[control_pb2.Verdict]:
    """Yield one verdict on each run, by name, as a caller may see it.

    Args:
        at_end: See :func:`judge_all`.
    """
    ranks: dict[str, list[control_pb2.RankStatus]] = {}
    for survey in surveys:
        for steps in survey.ranks:
            ranks.setdefault(steps.status.identity.run, []).append(steps.status)
    for verdict in judge_all(surveys, at_end=at_end):
        message = verdict_to_message(verdict)
        # Of the ranks' own names, since people run it: no node supplies it in a verdict.
        message.script = translate_diagnosis.script_words(
            (status.identity.command, status.identity.script) for status in ranks[verdict.run]
        )
        redact(message, map(uid_of, ranks[verdict.run]))
        yield message


def _is_training(steps: control_pb2.RankSteps) -> bool:
    return bool(steps.status.connected and steps.status.state == session_pb2.RUN_STATE_TRAINING)


def _has_ended(steps: control_pb2.RankSteps) -> bool:
    return not steps.status.connected or steps.status.state == session_pb2.RUN_STATE_FINISHED


def _newness(steps: control_pb2.RankSteps) -> tuple[bool, float]:
    return steps.status.connected, steps.status.last_step_unix_seconds
