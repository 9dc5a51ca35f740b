"""Between the fleet's messages and the daemon's own types, as far as ``service.translate`` does not."""

from torchperfd.v1 import contract, control_pb2, fleet_pb2, session_pb2
from torchperfd_daemon.captures.manifest import RankFacts
from torchperfd_daemon.captures.turns import Ack, Result
from torchperfd_daemon.fleet.fanout import PeerError, Unreachable
from torchperfd_daemon.service import translate

_MOST_CHARACTERS = 200


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


def unreachable_message(own: Unreachable) -> control_pb2.UnreachablePeer:
    """Pack a peer that has not answered."""
    return control_pb2.UnreachablePeer(address=str(own.address), reason=own.reason)


def tidy(run: control_pb2.Run) -> control_pb2.Run:
    """Return a run as another node tells of it, with nothing in its text that could drive a terminal."""
    for rank in run.ranks:
        for name in ("run", "job_name", "node", "script", "torch_version", "python_version"):
            setattr(rank.identity, name, line(getattr(rank.identity, name)))
    run.run, run.job_name = line(run.run), line(run.job_name)
    return run


def line(text: str) -> str:
    """Return another node's words as one short line."""
    return translate.one_line(text, _MOST_CHARACTERS)


def facts(status: control_pb2.RankStatus) -> RankFacts:
    """Unpack which process a rank on another node is."""
    return translate.rank_facts(translate.identity(status.identity), "")


def ack_report(capture_id: str, rank: int, own: Ack) -> fleet_pb2.TakeReport:
    """Pack a rank's answer to prepare."""
    return fleet_pb2.TakeReport(
        ack=fleet_pb2.TakeAck(
            rank=rank,
            ack=session_pb2.CaptureAck(
                capture_id=capture_id,
                ready=own.ready,
                reason=own.reason,
                next_step=own.next_step,
                step_seconds=own.step_seconds,
            ),
        )
    )


def result_report(capture_id: str, rank: int, own: Result) -> fleet_pb2.TakeReport:
    """Pack a rank's outcome."""
    return fleet_pb2.TakeReport(
        result=fleet_pb2.TakeResult(
            rank=rank,
            result=session_pb2.CaptureResult(
                capture_id=capture_id,
                ok=own.ok,
                reason=own.reason,
                retry=own.retry,
                start_step=own.start_step,
                steps=own.steps,
                file=own.file,
                bytes=own.bytes,
                sha256=own.sha256,
            ),
        )
    )
