"""Runs over HTTP: the documents of ``ps``, ``ranks``, ``steps``, ``diagnose``, ``goodput``; the history."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from torchperfd._version import __revision__, __version__
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.store.history import HISTORY_SECONDS
from torchperfd_daemon.store.model import HISTORY_STEPS, PRESENT_S
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.views import history, live
from torchperfd_daemon.views.documents import fleet_dict
from torchperfd_daemon.views.documents import to_dict as goodput_dict
from torchperfd_daemon.views.live import steps_dict
from torchperfd_daemon.views.model import parse_ranks, rank_state
from torchperfd_daemon.web.access import Access, Parts, Reader
from torchperfd_daemon.web.endpoint import flag, number, rank_number, view_dict
from torchperfd_daemon.web.past_runs import PastRuns
from torchperfd_daemon.web.run_rows import add_percentiles, run_row

T = TypeVar("T")

SLICE_S: Final = 0.002


async def in_slices(
    items: Iterable[T], seconds: float = SLICE_S, clock: Callable[[], float] = time.perf_counter
) -> AsyncIterator[T]:
    """Yield items; where work on them has held the loop for so many seconds, let others run first."""
    began = clock()
    for item in items:
        if clock() - began >= seconds:
            await asyncio.sleep(0)
            began = clock()
        yield item


_MAX_RANKS: Final = 64
_LAST_UNIX_S: Final = 1e11


class RunsApi:
    """Answers about runs."""

    def __init__(self, parts: Parts, reader: Reader, past: PastRuns) -> None:
        self._parts = parts
        self._reader = reader
        self._past = past

    async def info(self, request: Request, access: Access) -> dict[str, Any]:
        """The daemon itself."""
        info = await self._parts.control.GetInfo(control_pb2.GetInfoRequest(), access.call())
        owner = access is Access.OWNER
        return {
            "schema": "torchperfd.info/1",
            "api": 1,
            "version": __version__,
            "revision": __revision__ or None,
            "node": info.node,
            "instance": self._parts.instance,
            "fleet": self._parts.fleet,
            "clients": info.clients,
            "metrics_url": info.metrics_url,
            "captures_dir": info.captures_dir if owner else None,
            "view": self._view(access),
        }

    async def runs(self, request: Request, access: Access) -> dict[str, Any]:
        """All runs, those of the last day that have ended beside them."""
        fleet = flag(request, "fleet")
        listed = await self._reader.runs(access, fleet=fleet)
        verdicts = {
            each.run: each for each in (await self._reader.verdicts("", access, fleet=fleet)).verdicts
        }
        goodput = {each.run: each.ratio for each in await self._reader.goodput()}
        return {
            "schema": "torchperfd.ps/1",
            "node": self._parts.node,
            "runs": [self._row(run, verdicts.get(run.run), goodput.get(run.run)) for run in listed.runs],
            "finished": self._past.rows(access, goodput),
            **fleet_dict(listed),
            "view": self._view(
                access,
                [status for run in listed.runs for status in run.ranks],
                fleet=fleet,
                unreachable=listed.unreachable,
            ),
        }

    async def run(self, request: Request, access: Access) -> dict[str, Any]:
        fleet = flag(request, "fleet")
        name = await self._name(request, access, fleet=fleet)
        listed = await self._reader.runs(access, fleet=fleet)
        run = next((each for each in listed.runs if each.run == name), None)
        if run is None:
            finished = self._past.row(name, access)
            if finished is None:
                raise NoSuchTargetError(f"no run {name[:80]} on this node", "load /api/v1/runs")
            return {"schema": "torchperfd.run/1", "run": finished, "view": self._view(access)}
        verdicts = (await self._reader.verdicts(name, access, fleet=fleet)).verdicts
        goodput = await self._reader.goodput(name)
        ranks = self._reader.ranks(name)
        row = self._row(run, next(iter(verdicts), None), goodput[0].ratio if goodput else None)
        # In a thread, which frees the interpreter while it sorts.
        await asyncio.to_thread(add_percentiles, row, ranks, history.recent_durations(ranks))
        return {
            "schema": "torchperfd.run/1",
            "run": row,
            "phases": await _phase_names(ranks),
            "goodput": goodput_dict(goodput)["runs"][0] if goodput else None,
            "marks": self._past.marks(name),
            **fleet_dict(listed),
            "view": self._view(access, run.ranks, fleet=fleet, unreachable=listed.unreachable),
        }

    async def ranks(self, request: Request, access: Access) -> dict[str, Any]:
        """How each rank spends its steps."""
        fleet = flag(request, "fleet")
        name = await self._name(request, access, fleet=fleet)
        last = number(request, "last", self._present_steps(name), 1, HISTORY_STEPS, int)
        answer = await self._reader.steps(name, last, access, fleet=fleet)
        return {
            "schema": "torchperfd.ranks/1",
            "runs": [live.run_dict(each) for each in live.runs(answer.ranks)],
            **fleet_dict(answer),
            "view": self._view(
                access,
                [each.status for each in answer.ranks],
                fleet=fleet,
                unreachable=answer.unreachable,
                window_seconds=_window(answer.ranks),
            ),
        }

    def _present_steps(self, run: str) -> int:
        """Return how many newest steps the tiles of a run have; without a rank here all that are kept."""
        present = max((rank.present_steps for rank in self._reader.ranks(run)), default=0)
        return min(present, HISTORY_STEPS) or HISTORY_STEPS

    async def steps(self, request: Request, access: Access) -> dict[str, Any]:
        """One rank's newest steps."""
        name = await self._name(request, access)
        last = number(request, "last", 20, 1, HISTORY_STEPS, int)
        rank = _one_rank(request)
        [steps] = (await self._reader.steps(name, last, access, ranks=[rank])).ranks
        view = self._view(access, [steps.status], window_seconds=_window([steps]))
        return {**steps_dict(steps), "view": view}

    async def history(self, request: Request, access: Access) -> dict[str, Any]:
        """Every second of the last ten minutes and the newest steps, rank by rank."""
        name = await self._name(request, access)
        ranks = self._reader.ranks(name)
        if not ranks:
            raise NoSuchTargetError(f"no run {name[:80]} on this node", "load /api/v1/runs")
        seconds = number(request, "seconds", HISTORY_SECONDS, 0, HISTORY_SECONDS, int)
        steps = number(request, "steps", HISTORY_STEPS, 0, HISTORY_STEPS, int)
        since = number(request, "since", 0.0, 0, _LAST_UNIX_S, float)
        phases, now = flag(request, "phases", default=True), time.time()
        wanted = set(parse_ranks(request.query_params.get("ranks", ""), _MAX_RANKS))
        chosen = [rank for rank in ranks if not wanted or rank.identity.rank in wanted][:_MAX_RANKS]

        def row(rank: Rank) -> msgspec.Raw:
            return _encoded(
                {
                    "rank": rank.identity.rank,
                    "node": rank.identity.node,
                    "state": rank_state(rank),
                    "seconds": history.seconds_dict(
                        history.whole_seconds(rank, int(since), now, seconds), phases=phases
                    ),
                    "steps": history.steps_dict(rank, steps, since, phases=phases),
                }
            )

        numbers = [rank.identity.rank for rank in ranks]
        own = [history.own_seconds(rank, max(1, seconds)) async for rank in in_slices(ranks)]
        return {
            "schema": "torchperfd.history/1",
            "run": name,
            "world_size": max(rank.identity.world_size for rank in ranks),
            "phases": await _phase_names(ranks),
            "ranks_here": numbers,
            "ranks": [row(rank) async for rank in in_slices(chosen)],
            # In a thread, which frees the interpreter while it sorts.
            "across": await asyncio.to_thread(history.across_dict, numbers, own, max(1, seconds)),
            "marks": self._past.marks(name),
            "view": self._view(access, ranks, window_seconds=float(seconds)),
        }

    async def diagnose(self, request: Request, access: Access) -> dict[str, Any]:
        """The verdict on one run, or on all."""
        fleet = flag(request, "fleet")
        name = await self._name(request, access, fleet=fleet) if "run" in request.path_params else ""
        answer = await self._reader.verdicts(name, access, fleet=fleet)
        listed = await self._reader.runs(access, fleet=fleet)
        return {
            "schema": "torchperfd.diagnosis/1",
            "verdicts": [verdict_to_document(each) for each in answer.verdicts],
            **fleet_dict(answer),
            "view": self._view(
                access,
                [status for run in listed.runs if name in ("", run.run) for status in run.ranks],
                fleet=fleet,
                unreachable=answer.unreachable,
                window_seconds=max((each.window_seconds for each in answer.verdicts), default=0) or PRESENT_S,
            ),
        }

    async def goodput(self, request: Request, access: Access) -> dict[str, Any]:
        """How rank-seconds were spent, also of runs that have ended."""
        given = request.path_params.get("run", "")
        name = await self._name(request, access) if given else ""
        runs = await self._reader.goodput(name)
        if name and not runs:
            raise NoSuchTargetError(f"no run {name[:80]} on this node", "load /api/v1/goodput")
        since = min((run.since_unix_seconds for run in runs), default=0.0)
        until = max((run.until_unix_seconds for run in runs), default=0.0)
        view = self._view(access, window_seconds=until - since if runs else None)
        return {**goodput_dict(runs), "view": view}

    async def _name(self, request: Request, access: Access, *, fleet: bool = False) -> str:
        given: str = request.path_params["run"]
        return await self._reader.run_name(given, access, fleet=fleet)

    def _row(
        self, run: control_pb2.Run, verdict: control_pb2.Verdict | None, goodput: float | None
    ) -> dict[str, Any]:
        ranks: list[Rank] = self._reader.ranks(run.run)
        return {
            **run_row(run, ranks, self._parts.gpu_of),
            "goodput_ratio": goodput,
            "verdict": None if verdict is None else verdict_to_document(verdict),
            "captures_in_progress": self._parts.coordinator.live_of(run.run),
            "first_seen_unix_seconds": self._past.first_seen(run.run),
        }

    def _view(self, access: Access, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return view_dict(self._parts.node, access, *args, **kwargs)


async def _phase_names(ranks: Sequence[Rank]) -> list[str]:
    return history.phase_names(
        [rank.history.mean_phase_seconds(HISTORY_STEPS) async for rank in in_slices(ranks)]
    )


def _encoded(row: dict[str, Any]) -> msgspec.Raw:
    """Return a part of a document as JSON, so that encoding all of it takes no time."""
    return msgspec.Raw(msgspec.json.encode(row))


def _one_rank(request: Request) -> int:
    given: str = request.path_params["rank"]
    rank = rank_number(given)
    if rank is None:
        raise NoSuchTargetError(f"{given[:80]!r} is no rank")
    return rank


def _window(messages: Any) -> float | None:
    """Return the seconds that the steps in messages span; None without any."""
    spans = [
        sum(memoryview(message.duration_ns).cast("q")) / 1e9 * max(1, message.block_steps)
        for message in messages
        if message.count
    ]
    return max(spans, default=None)
