"""``torchperfd whatif``."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import click

from torchperfd.document.blocks import Document, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import duration
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._output import Answer, live
from torchperfd_cli.commands._scope import run_option, whole_run
from torchperfd_daemon.diagnosis.detect.straggler import MIN_STEPS, RankWork
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.diagnosis.evidence import MIN_WINDOW_SAMPLES, WARM_STEPS
from torchperfd_daemon.diagnosis.predictions import Predictions, Removed, WhatIf, predict
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.service.translate_work import comparison_from_messages, rank_work_from_message
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.model import steady

_TIMEOUT_S: Final = 10.0
# Causes of which the time can be removed, also where no single rank has them; and what are no causes.
_MODELLED: Final = frozenset(
    {Cause.INPUT_BOUND, Cause.SLOW_IO, Cause.CHECKPOINT, Cause.GARBAGE_COLLECTION, Cause.COLLECTIVE}
    | {Cause.SLOW_RANK, Cause.HANG, Cause.NONE, Cause.UNKNOWN}
)
_MODELLED_NAMES: Final = frozenset(cause.value for cause in _MODELLED)


@click.command("whatif")
@run_option
@live
def whatif_command(run: str, socket: str | None, as_json: bool) -> Answer:
    """Predict how much faster a run would be without each cause of its slowness.

    Replays the newest recorded steps of all its ranks with one cause removed: a rank's excess over its
    peers, the wait for data, saving, garbage collection, the exchange itself. For a run that has become
    slower, replays the steps since then, and also predicts the step without the growth.
    """
    with connect(socket) as daemon:
        run = whole_run(daemon, run)
        messages = daemon.GetSteps(control_pb2.GetStepsRequest(run=run), timeout=_TIMEOUT_S).ranks
        verdicts = daemon.Diagnose(control_pb2.DiagnoseRequest(run=run), timeout=_TIMEOUT_S).verdicts
    by_run: dict[str, list[control_pb2.RankSteps]] = {}
    for message in map(steady, messages):
        by_run.setdefault(message.status.identity.run, []).append(message)
    judged = {each.run: each for each in verdicts}
    shown, runs, short = Document([]), list[dict[str, Any]](), list[str]()
    for name, ranks in sorted(by_run.items()):
        verdict = judged.get(name, control_pb2.Verdict())
        since = verdict.onset_step if verdict.HasField("onset_step") else None
        own = fleet_translate.verdict_from_message(verdict)
        said = (own, *own.others) if name in judged else ()
        found = replay_newest(_view.present(ranks), since or 0, said)
        if found is None:
            short.append(name)
            continue
        world = max(each.status.identity.world_size for each in ranks)
        hang = verdict.summary if verdict.cause == Cause.HANG.value else ""
        left_out = not_modelled(verdict, found)
        shown += run_document(name, world, found, since, hang, left_out)
        others = [{"cause": each.cause, "seconds_per_step": each.cost_seconds_per_step} for each in left_out]
        runs.append(
            {
                **_dict(name, world, found),
                "since_step": since,
                "hang": hang or None,
                "not_modelled": others,
            }
        )
    missing = ""
    if short:
        missing = (
            f"the ranks of {', '.join(short)} have fewer than {MIN_STEPS} training steps in common;"
            " try again when they have made more"
        )
    if as_json:
        return Answer({"schema": "torchperfd.whatif/1", "runs": runs}, missing=missing)
    return Answer(shown if runs or not short else None, missing=missing)


def not_modelled(verdict: control_pb2.Verdict, predictions: Predictions) -> list[control_pb2.Verdict]:
    """Return a verdict and its further causes, those of them that no prediction removes.

    One rank's loss is part of its excess over its peers, and what has come since the onset is growth.
    """
    if any(each.removed is Removed.GROWTH for each in predictions.answers):
        return []
    return [
        each
        for each in (verdict, *verdict.others)
        if each.cause not in _MODELLED_NAMES
        and each.cost_seconds_per_step > 0
        and (each.rank < 0 or not predictions.synchronous)
    ]


def run_document(
    run: str,
    world_size: int,
    predictions: Predictions,
    since: int | None = None,
    hang: str = "",
    left_out: Sequence[control_pb2.Verdict] = (),
) -> Document:
    """Return a run's predictions as a table, the greatest gain first.

    Args:
        since: The step since which it is slower; None where it has not slowed down.
        hang: The verdict on it while it hangs; else empty.
        left_out: The causes that no prediction removes.
    """
    slower = f" since step {since}" if since is not None else ""
    replayed = "means of a second on the devices" if predictions.on_device else "steps"
    hangs = f"run {run} hangs, so that no step is made; what follows is about those before"
    above = [hangs, hang] if hang else []
    above.append(
        f"run {run}: a step takes {duration(predictions.step_seconds)}{slower},"
        f" {predictions.steps} {replayed} replayed"
        f" (the replay yields {duration(predictions.replayed_seconds)})"
    )
    if not predictions.answers:
        above.append("no phase, rank or exchange that the replay can remove would make a step shorter")
    rows = [
        [
            f"  of it, {describe(each)}" if each.is_part else describe(each),
            duration(each.step_seconds),
            duration(each.gain_seconds),
            f"{each.speedup:.2f}x",
        ]
        for each in predictions.answers
    ]
    table = Table(["WITHOUT", "STEP", "GAIN", "SPEED-UP"], rows, left=("WITHOUT",), fold="WITHOUT")
    remarks = Sentences(_remarks(world_size, predictions, left_out))
    return Document([[Sentences(above), *([table] if rows else []), remarks]])


def _remarks(world_size: int, predictions: Predictions, left_out: Sequence[control_pb2.Verdict]) -> list[str]:
    remarks = []
    if predictions.ranks > 1 and not predictions.synchronous:
        remarks.append("no rank waits for another in a collective that is seen: each is replayed alone")
    if predictions.ranks < world_size:
        remarks.append(
            f"{predictions.ranks} of {world_size} ranks are on this node;"
            " a wait for the others counts as exchange"
        )
    if left_out:
        causes = ", ".join(
            f"{each.cause} ({duration(each.cost_seconds_per_step)} of each"
            f" {duration(each.step_seconds or predictions.step_seconds)} step)"
            for each in left_out
        )
        remarks.append(f"not modelled: {causes}; `torchperfd diagnose` has what to change")
    return remarks


def describe(answer: WhatIf) -> str:
    """Return what is removed, for people."""
    if answer.removed is Removed.RANK_EXCESS:
        return f"what rank {answer.rank} needs more than its peers, most of it in {answer.phase}"
    if answer.removed is Removed.SLOW_RANKS:
        return "what any rank needs more than its peers"
    if answer.removed is Removed.UNEVEN_WORK:
        return "differences of the ranks' work from step to step"
    if answer.removed is Removed.GARBAGE_COLLECTION:
        return "Python's garbage collections"
    if answer.removed is Removed.EXCHANGE:
        return "the exchange, once the last rank is there"
    if answer.removed is Removed.GROWTH:
        return "what has grown since then, on all ranks and in the exchange"
    return {"data": "waiting for data", "checkpoint": "saving within steps", "h2d": "copying batches"}.get(
        answer.phase, f"the phase {answer.phase}"
    )


def replay_newest(
    messages: Sequence[control_pb2.RankSteps], since: int, verdicts: Sequence[Verdict] = ()
) -> Predictions | None:
    """Predict from a run's newest steps: those on the devices if ranks wait for each other there.

    Args:
        since: The step since which it is slower; 0 where it has not slowed down.
        verdicts: On this run, the first cause first.

    Returns:
        None where there are too few steps.
    """
    times = comparison_from_messages(messages)
    if not times.on_device:
        return _replay_common_steps(messages, since, hidden=times.hidden)
    count = min(len(column) for work in times.works for column in work.phase_seconds.values())
    if count < MIN_WINDOW_SAMPLES:
        return None
    pauses = {message.status.identity.rank: _pauses(message) for message in messages}
    newest = predict([_part(work, -count, None) for work in times.works], pauses).as_judged(verdicts)
    newest = replace(newest, on_device=True)
    # The past is known by steps, which are as long on the host as on the device.
    by_steps = _replay_common_steps(messages, since, hidden=True)
    return newest.with_growth_of(by_steps) if by_steps is not None else newest


def _replay_common_steps(
    messages: Sequence[control_pb2.RankSteps], since: int, *, hidden: bool
) -> Predictions | None:
    """Predict from the steps since ``since`` that all ranks have in common; None where these are too few."""
    first = max(since, *(message.first_step for message in messages))
    count = min(message.first_step + message.count for message in messages) - first
    if count < MIN_STEPS:
        return None
    works = [(rank_work_from_message(message), message.first_step) for message in messages]
    earliest = max(WARM_STEPS, *(start for _, start in works))
    enough = since - earliest >= MIN_STEPS
    return predict(
        [_part(work, first - start, first - start + count) for work, start in works],
        {message.status.identity.rank: _pauses(message) for message in messages},
        [_part(work, earliest - start, since - start) for work, start in works] if enough else (),
        hidden=hidden,
    )


def _part(work: RankWork, first: int, end: int | None) -> RankWork:
    return replace(
        work, phase_seconds={name: column[first:end] for name, column in work.phase_seconds.items()}
    )


def _pauses(message: control_pb2.RankSteps) -> list[Pauses]:
    """Return a rank's garbage collections as they are lately, else those of its whole training."""
    if message.recent_gc:
        return [Pauses(each.per_step, each.seconds) for each in message.recent_gc]
    steps = message.status.steps
    return [Pauses.of(each.calls, each.ns, steps) for each in message.gc if each.calls and steps]


def _dict(run: str, world_size: int, predictions: Predictions) -> dict[str, Any]:
    return {
        "run": run,
        "ranks": predictions.ranks,
        "world_size": world_size,
        "steps": predictions.steps,
        "synchronous": predictions.synchronous,
        "timed_on": "device" if predictions.on_device else "host",
        "step_seconds": predictions.step_seconds,
        "replayed_seconds": predictions.replayed_seconds,
        "answers": [
            {
                **asdict(each),
                "removed": each.removed.value,
                "phase": each.phase or None,
                "speedup": each.speedup,
            }
            for each in predictions.answers
        ],
    }
