"""Conversion between the messages about stacks and the daemon's own types."""

import itertools
from collections.abc import Iterable
from typing import Final

from torchperfd.slow_line import SlowLine
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.service.fields import pack, unpack
from torchperfd_daemon.service.stack_requests import Report
from torchperfd_daemon.stacks import Frame, GroupProgress, Outcome, RankStacks, Thread, tidy
from torchperfd_daemon.text import one_line

_OUTCOMES: Final = {
    Outcome.ANSWERED: control_pb2.STACK_OUTCOME_ANSWERED,
    Outcome.READ: control_pb2.STACK_OUTCOME_READ,
    Outcome.SIGNALLED: control_pb2.STACK_OUTCOME_SIGNALLED,
    Outcome.STOPPED: control_pb2.STACK_OUTCOME_STOPPED,
    Outcome.GONE: control_pb2.STACK_OUTCOME_GONE,
    Outcome.NO_ANSWER: control_pb2.STACK_OUTCOME_NO_ANSWER,
}
_OUTCOMES_IN: Final = {value: outcome for outcome, value in _OUTCOMES.items()}
_MAX_THREADS: Final = 256
_MAX_FRAMES: Final = 128
_MAX_CHARACTERS: Final = 500
_MAX_GROUPS: Final = 64
_SLOW_LINE_TEXTS: Final = ("stage", "file", "function", "call", "caller")
_LAST_STEP: Final = 2**62


def report(message: session_pb2.StackReport) -> Report:
    """Unpack and tidy a rank's answer; its text ends up on terminals."""
    return Report(
        threads=tidy(_threads(message.threads), message.package),
        phase=one_line(message.phase, 64),
        step=min(message.step, _LAST_STEP),
    )


def collectives(messages: Iterable[session_pb2.GroupProgress]) -> tuple[GroupProgress, ...]:
    """Unpack the progress of a rank's process groups; its text ends up on terminals."""
    return tuple(
        GroupProgress(
            one_line(message.name, _MAX_CHARACTERS),
            one_line(message.description, _MAX_CHARACTERS),
            message.begun,
            message.number,
            one_line(message.call, _MAX_CHARACTERS),
            one_line(message.sizes, _MAX_CHARACTERS),
        )
        for message in itertools.islice(messages, _MAX_GROUPS)
    )


def rank_stacks_message(run: str, uid: int | None, own: RankStacks) -> control_pb2.RankStacks:
    """Pack one rank's stacks; its process is of the user given."""
    return pack(
        control_pb2.RankStacks,
        own,
        identity=pack(session_pb2.RankIdentity, own, run=run),
        uid=uid,
        outcome=_OUTCOMES[own.outcome],
        reason=one_line(own.reason, _MAX_CHARACTERS),
        collectives=[pack(session_pb2.GroupProgress, group) for group in own.collectives],
        threads=map(_thread_message, own.threads[:_MAX_THREADS]),
    )


def _thread_message(own: Thread) -> session_pb2.ThreadStack:
    frames = [
        session_pb2.StackFrame(
            file=one_line(frame.file, _MAX_CHARACTERS),
            line=frame.line,
            function=one_line(frame.function, _MAX_CHARACTERS),
            call=one_line(frame.call, _MAX_CHARACTERS),
        )
        for frame in own.frames[:_MAX_FRAMES]
    ]
    return pack(session_pb2.ThreadStack, own, name=one_line(own.name, _MAX_CHARACTERS), frames=frames)


def rank_stacks(message: control_pb2.RankStacks) -> RankStacks:
    """Unpack one rank's stacks, as a command receives them."""
    since = message.seconds_since_step
    return RankStacks(
        rank=message.identity.rank,
        world_size=message.identity.world_size,
        node=message.identity.node,
        pid=message.identity.pid,
        outcome=_OUTCOMES_IN.get(message.outcome, Outcome.NO_ANSWER),
        reason=message.reason,
        threads=_threads(message.threads),
        phase=message.phase,
        step=message.step if message.HasField("step") else None,
        step_seconds=message.step_seconds,
        seconds_since_step=since if message.HasField("seconds_since_step") else None,
        collectives=collectives(message.collectives),
    )


def slow_line_message(line: SlowLine) -> control_pb2.SlowLine:
    """Pack a slow line."""
    texts = {name: one_line(getattr(line, name), _MAX_CHARACTERS) for name in _SLOW_LINE_TEXTS}
    return pack(control_pb2.SlowLine, line, **texts)


def slow_line(message: control_pb2.SlowLine) -> SlowLine:
    """Unpack a slow line of another node's daemon."""
    known = unpack(message, SlowLine)
    texts = {name: one_line(known[name], _MAX_CHARACTERS) for name in _SLOW_LINE_TEXTS}
    shares = {name: known[name] if 0 <= known[name] <= 1 else 0.0 for name in ("share", "stage_share")}
    return SlowLine(**{**known, **texts, **shares})


def _threads(messages: Iterable[session_pb2.ThreadStack]) -> tuple[Thread, ...]:
    return tuple(
        Thread(
            message.ident,
            message.name,
            message.training,
            message.own,
            tuple(Frame(frame.file, frame.line, frame.function, frame.call) for frame in message.frames),
            message.worker_pid,
            message.worker if message.worker_pid else -1,
        )
        for message in messages
    )
