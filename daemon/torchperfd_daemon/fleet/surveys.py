"""Merges the nodes' surveys: each rank once, one verdict on each run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchperfd.v1 import control_pb2, fleet_pb2, session_pb2
from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.diagnosis.verdict import working_command
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.fleet.verdict import NodePart, judge
from torchperfd_daemon.service import translate, translate_diagnosis
from torchperfd_daemon.service.targets import Redact


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
        {message.run: fleet_translate.verdict_from_message(message) for message in survey.verdicts}
        for survey in surveys
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
        times = translate.comparison_from_messages(messages)
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
            verdict = judge(run, parts, missing, hidden=times.hidden, on_device=times.on_device)
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
        message = translate_diagnosis.verdict_to_message(verdict)
        # Of the ranks' own names, since people run it: no node supplies it in a verdict.
        message.script = translate_diagnosis.script_words(
            (status.identity.command, status.identity.script) for status in ranks[verdict.run]
        )
        redact(message, map(fleet_translate.uid_of, ranks[verdict.run]))
        yield message


def _is_training(steps: control_pb2.RankSteps) -> bool:
    return bool(steps.status.connected and steps.status.state == session_pb2.RUN_STATE_TRAINING)


def _has_ended(steps: control_pb2.RankSteps) -> bool:
    return not steps.status.connected or steps.status.state == session_pb2.RUN_STATE_FINISHED


def _newness(steps: control_pb2.RankSteps) -> tuple[bool, float]:
    return steps.status.connected, steps.status.last_step_unix_seconds
