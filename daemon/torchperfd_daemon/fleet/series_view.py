"""Answers the read commands from series, with the messages by which a daemon answers them."""

from collections.abc import Collection, Iterator
from typing import Final

from torchperfd.v1 import contract, control_pb2, session_pb2
from torchperfd_daemon.diagnosis.detect.straggler import mean_of
from torchperfd_daemon.fleet.series import list_runs
from torchperfd_daemon.fleet.series_model import RankSeries, RunSeries, Series
from torchperfd_daemon.fleet.series_reader import SeriesReader
from torchperfd_daemon.fleet.series_verdict import (
    WAIT,
    are_on_device,
    hang_seconds,
    own_phases,
    rank_work,
    verdict_on,
)
from torchperfd_daemon.goodput.totals import Bucket
from torchperfd_daemon.service.translate_verdict import verdict_to_message
from torchperfd_daemon.store.model import PRESENT_S

UNDIVIDED: Final = "own work"
"""Stands for the phases of a rank of which they were not read."""
_NS_BYTES: Final = 8
_STATES: Final = {
    name.removeprefix("RUN_STATE_").lower(): number for name, number in session_pb2.RunState.items()
}


class SeriesView:
    """Stands for a daemon that knows all nodes: has its calls of the service Control that only read."""

    def __init__(self, reader: SeriesReader) -> None:
        self._reader = reader
        self._store = reader.store

    def GetInfo(  # noqa: N802
        self, request: control_pb2.GetInfoRequest, timeout: float = 0.0
    ) -> control_pb2.GetInfoResponse:
        """Return the store's address in place of a node."""
        api = session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX)
        return control_pb2.GetInfoResponse(api=api, node=self._store.address)

    def ListRuns(  # noqa: N802
        self, request: control_pb2.ListRunsRequest, timeout: float = 0.0
    ) -> control_pb2.ListRunsResponse:
        """Return the runs, without their ranks."""
        jobs = list_runs(self._store)
        return control_pb2.ListRunsResponse(
            runs=[
                control_pb2.Run(run=run, job_name=job)
                for run, job in sorted(jobs.items())
                if request.job in ("", job)
            ]
        )

    def runs_with_ranks(self, job: str = "") -> control_pb2.ListRunsResponse:
        """Return the runs with the status of their ranks, of all jobs or of one."""
        series = self._reader.read("", job, with_status=True)
        answer = control_pb2.ListRunsResponse(nodes=_nodes(series), unreachable=self._unreachable(series))
        for run in _by_name(series):
            steps = control_pb2.GetStepsResponse()
            _add_steps(run, steps)
            answer.runs.add(
                run=run.run,
                job_name=run.job_name,
                world_size=run.world_size,
                ranks=[each.status for each in steps.ranks],
            )
        return answer

    def GetSteps(  # noqa: N802
        self, request: control_pb2.GetStepsRequest, timeout: float = 0.0
    ) -> control_pb2.GetStepsResponse:
        """Return the present mean step of each rank; with its error where the comparison needs it."""
        series = self._reader.read(request.run, request.job, with_status=True)
        answer = control_pb2.GetStepsResponse(nodes=_nodes(series), unreachable=self._unreachable(series))
        for run in _by_name(series):
            _add_steps(run, answer, set(request.ranks))
        return answer

    def Diagnose(  # noqa: N802
        self, request: control_pb2.DiagnoseRequest, timeout: float = 0.0
    ) -> control_pb2.DiagnoseResponse:
        """Return one verdict on each run."""
        series = self._reader.read(request.run, request.job)
        found = (verdict_on(run) for run in _by_name(series))
        return control_pb2.DiagnoseResponse(
            verdicts=[verdict_to_message(verdict) for verdict in found if verdict is not None],
            nodes=_nodes(series),
            unreachable=self._unreachable(series),
        )

    def GetReadings(  # noqa: N802
        self, request: control_pb2.GetReadingsRequest, timeout: float = 0.0
    ) -> control_pb2.GetReadingsResponse:
        """Return nothing: readings are of one node."""
        return control_pb2.GetReadingsResponse()

    def goodput(self, run: str = "") -> dict[str, dict[str, dict[Bucket, float]]]:
        """Return the rank-seconds of each run by node and bucket, of runs that have series now."""
        chosen = f'{{run="{_escaped(run)}"}}' if run else ""
        answer = self._store.query(
            f"sum by (run, cluster, instance, bucket) (torchperfd_train_goodput_seconds_total{chosen})"
        )
        buckets = {bucket.value: bucket for bucket in Bucket}
        found: dict[str, dict[str, dict[Bucket, float]]] = {}
        for labels, seconds in answer.rows:
            if bucket := buckets.get(labels.get("bucket", "")):
                place = " ".join(filter(None, (labels.get("cluster", ""), labels.get("instance", ""))))
                nodes = found.setdefault(labels.get("run", ""), {})
                nodes.setdefault(place, dict.fromkeys(Bucket, 0.0))[bucket] += seconds
        return found

    def _unreachable(self, series: Series) -> Iterator[control_pb2.UnreachablePeer]:
        for address in series.down:
            yield control_pb2.UnreachablePeer(address=address, reason="not scraped")
        if series.partial:
            yield control_pb2.UnreachablePeer(address=self._store.address, reason=series.partial)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _by_name(series: Series) -> list[RunSeries]:
    return [series.runs[name] for name in sorted(series.runs)]


def _nodes(series: Series) -> list[control_pb2.FleetNode]:
    nodes: dict[tuple[str, ...], control_pb2.FleetNode] = {}
    for run in series.runs.values():
        for source, node in run.nodes.items():
            there = nodes.setdefault(source, control_pb2.FleetNode(address=source[-1], node=node.node))
            there.ranks += node.ranks
    return sorted(nodes.values(), key=lambda node: (node.node, node.address))


def _add_steps(run: RunSeries, answer: control_pb2.GetStepsResponse, wanted: Collection[int] = ()) -> None:
    """Add the mean steps of a run's ranks, of all or of some; in place, since messages are copied slowly."""
    on_device = are_on_device(run)
    compared = {rank.rank for rank in run.compared}
    stalled = hang_seconds(run)
    for number in sorted(run.ranks):
        if wanted and number not in wanted:
            continue
        rank = run.ranks[number]
        steps = answer.ranks.add()
        status = steps.status
        identity = status.identity
        identity.run, identity.rank, identity.job_name = run.run, number, run.job_name
        identity.world_size = run.world_size
        node = run.nodes.get(rank.source)
        identity.node = node.node if node else ""
        status.connected = True
        status.state = _STATES.get(rank.state, session_pb2.RUN_STATE_UNSPECIFIED)
        status.steps, status.last_step_unix_seconds = rank.steps, rank.last_step_unix_seconds
        status.stalled_seconds = stalled.get(rank.source, 0.0)
        for kind, place in rank.places.items():
            status.coordinates.add(dimension=kind, rank=place, size=place + 1)
        if rank.own_seconds is not None:
            _add_times(rank, steps, on_device=on_device, compared=number in compared)


def _add_times(rank: RankSeries, steps: control_pb2.RankSteps, *, on_device: bool, compared: bool) -> None:
    """Add a rank's mean step as one block, or as blocks that differ as its error says."""
    own, wait = rank.own_seconds or 0.0, rank.wait_seconds
    if compared:
        columns = rank_work(rank, on_device=on_device, undivided=UNDIVIDED).phase_seconds
        if wait is None:
            del columns[WAIT]
        means = {name: mean_of(column) for name, column in columns.items()}
        packed = {name: (column * 1e9).astype("<i8").tobytes() for name, column in columns.items()}
    else:
        # Of thousands of ranks each has one mean, for which arrays take long.
        means = own_phases(rank, on_device=on_device) or {UNDIVIDED: own}
        if wait is not None:
            means[WAIT] = wait
        packed = {name: _packed(mean) for name, mean in means.items()}
    count = max(map(len, packed.values())) // _NS_BYTES
    # Times of devices are read, or those of hosts.
    phases = steps.device_phases if on_device else steps.phases
    for name, column in packed.items():
        phases.add(phase=name, ns=column)
    status = steps.status
    status.step_seconds = step = own + (wait or 0.0)
    status.phase_seconds.update(means)
    steps.first_step, steps.count = max(0, rank.steps - count), count
    steps.duration_ns = _packed(step) * count
    steps.block_steps = max(1, round(PRESENT_S / step / count)) if step > 0 else 1


def _packed(seconds: float) -> bytes:
    """Return seconds as messages have them, in nanoseconds."""
    return int(seconds * 1e9).to_bytes(_NS_BYTES, "little", signed=True)
