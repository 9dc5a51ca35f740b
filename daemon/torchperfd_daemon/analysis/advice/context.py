"""The inputs of rules: the steps of one trace and the calls in them, corrected for the cost of recording."""

from collections.abc import Callable
from functools import cached_property
from typing import Final

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd.model.loader_facts import UNMEASURED_COST, WorkerCost
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.analysis.advice.edits import Edit, HostCost, HostTime, Spans
from torchperfd_daemon.analysis.advice.recording import (
    MAX_BETWEEN_NS,
    Calls,
    Outer,
    RecordingCost,
    find_disturbances,
    unrecorded_idle,
)
from torchperfd_daemon.analysis.advice.run_facts import RunFacts
from torchperfd_daemon.analysis.advice.savings import HostCalls, Savings, find_host_calls, timeline
from torchperfd_daemon.analysis.breakdown import Breakdown, DeviceTime
from torchperfd_daemon.analysis.callers import Links, find_links
from torchperfd_daemon.analysis.categories import ANNOTATION, DEVICE, DRAW, OPERATOR
from torchperfd_daemon.analysis.host_activity import Kinds, collective_spans
from torchperfd_daemon.analysis.idle import Idle
from torchperfd_daemon.analysis.intervals import Cover, outermost
from torchperfd_daemon.analysis.overhead import ColdStart, find_cold_start, find_launches, find_overheads
from torchperfd_daemon.analysis.steps import Step, TimedBy, edges
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_FROM_WORKERS: Final = f"{DRAW}_MultiProcessing"
_OF_MODEL: Final = ("forward", "loss", "backward")


class AdviceContext:
    """The steps of one trace.

    Args:
        timed_by: Whose times the steps are: the device's where the host runs ahead of it.
        is_whole: The one step is the whole recording, since nothing marks steps in it.
        loader_advice: What the run was advised on its loaders, which is repeated; None if that is unknown.

    Attributes:
        step_ns: The length of one step, without the cost of recording.
        count: The steps that the rules use: all but the unusually long ones.
        idle_ns: The device's idle time in a step by cause, without the part that recording causes.
    """

    def __init__(
        self,
        trace: Trace,
        steps: list[Step],
        breakdowns: list[Breakdown],
        idle: Idle | None,
        links: Links | None = None,
        worker_cost: Callable[[], WorkerCost] = lambda: UNMEASURED_COST,
        *,
        timed_by: TimedBy = "host",
        is_whole: bool = False,
        device: DeviceTime | None = None,
        loader_advice: SettledAdvice | None = None,
        kinds: Kinds | None = None,
    ) -> None:
        self.worker_cost = worker_cost
        self.loader_advice = loader_advice
        self._links = links or find_links(trace)
        self._annotated: dict[tuple[str, ...], Spans] = {}
        self._kinds = kinds or Kinds(trace, self._links)
        self._device = device or DeviceTime(trace)
        self.overheads = find_overheads(trace)
        self.launches = find_launches(trace, self._links)
        self.trace = trace
        self.idle = idle
        self.is_whole = is_whole
        self.breakdowns = breakdowns
        self.run = RunFacts(trace, on_device=self.on_device)
        self._starts, self._ends = edges(steps, host=True)
        self._windows = np.array([step.window for step in steps], dtype=np.int64).reshape(-1, 2)
        self._operators = trace.of_categories({OPERATOR})
        self._recording = RecordingCost(
            trace,
            self._windows[:, 0],
            self._windows[:, 1],
            self._operators | trace.of_categories({ANNOTATION}),
            self._waited(),
            self.overheads.profilers,
            self._disturbances(),
            on_device=self.on_device,
        )
        kept = self._recording.undisturbed
        self._starts, self._ends, self._windows = (
            each[kept] for each in (self._starts, self._ends, self._windows)
        )
        self._kept = np.flatnonzero(kept).tolist()
        self.count = len(self._kept)
        self.breakdowns = [each for each, keep in zip(breakdowns, kept.tolist(), strict=True) if keep]
        busy = np.array([each.busy_ns for each in self.breakdowns], dtype=np.int64)
        lengths = self._windows[:, 1] - self._windows[:, 0]
        recorded = float(lengths.mean())
        if timed_by == "host":
            # A host that runs ahead has time for being recorded.
            lengths = np.maximum(lengths - self.recording(self._windows[:, 0], self._windows[:, 1]), busy)
        else:
            lengths = lengths - self._alone(self.overheads.profilers)
        self.step_ns: float = float(lengths.mean())
        self._step_is_known = (
            timed_by == "host" and self.on_device and 0 < trace.unrecorded_step_ns < recorded
        )
        if self._step_is_known:
            # Recording costs the host of a device more than its events explain, because of CUPTI: steps
            # that an H200's host bounds took 2.1 times as long.
            self.step_ns = max(float(trace.unrecorded_step_ns), float(busy.mean()))
        self._recorded_ns = recorded
        self.inflation: float = self._recording.inflation(self.step_ns)
        self.idle_ns = unrecorded_idle(
            idle, self._kept, self.step_ns - float(busy.mean()), recorded - self.step_ns
        )

    def _alone(self, rows: Int64) -> Int64:
        """Return how much of each step some events cover while nothing runs on the device, in ns."""
        trace, events = self.trace, self._device.rows
        busy = Cover(trace.start[events], trace.end[events])
        either = busy | Cover(trace.start[rows], trace.end[rows])
        starts, ends = self._windows[:, 0], self._windows[:, 1]
        return either.up_to(ends) - either.up_to(starts) - busy.up_to(ends) + busy.up_to(starts)

    def _disturbances(self) -> Cover:
        """Return what disturbed single steps of a process alone."""
        trace, operators = self.trace, np.flatnonzero(self._operators)
        # Ranks that exchange, and a loader's workers, take the CPUs from each other in unrecorded steps too.
        shares_cpus = len(collective_spans(trace)) > 0 or len(self.annotated(_FROM_WORKERS)) > 0
        if self.on_device or shares_cpus or not trace.unrecorded_step_ns:
            operators = operators[:0]
        return find_disturbances(trace, operators[self.within(trace.start[operators])], self._starts)

    def _waited(self) -> Int64:
        waits = self.annotated(_FROM_WORKERS)
        waited = np.zeros(len(self._starts), dtype=np.int64)
        np.add.at(
            waited, np.searchsorted(self._starts, waits.start, side="right") - 1, waits.end - waits.start
        )
        return waited

    @property
    def a_step(self) -> str:
        """The unit of figures, after them: ``a step``, or that it is the whole recording."""
        return "in the recording" if self.is_whole else "a step"

    @property
    def each_step(self) -> str:
        """The whole that figures are parts of, in words, with its length."""
        length = ns_text(self.step_ns)
        return f"the {length} recorded" if self.is_whole else f"each step of {length}"

    @property
    def on_device(self) -> bool:
        """Whether anything ran on a device during the steps."""
        return any(each.n_gpu_events for each in self.breakdowns)

    @cached_property
    def followed_share(self) -> float:
        """The share of launches in the steps that have their kernels, 0 to 1; 1 without launches.

        A launch that is written into a graph has none.
        """
        inside = self.within(self.trace.start[self.launches.rows])
        return float(self.launches.followed[inside].mean()) if inside.any() else 1.0

    @cached_property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured in the steps."""
        return self.launches.is_capturing(int(self._starts[0]), int(self._ends[-1]))

    @cached_property
    def cold_start(self) -> ColdStart:
        """The first calls in the steps; none without a device."""
        if not self.on_device:
            return ColdStart()
        windows = list(zip(self._starts.tolist(), self._ends.tolist(), strict=True))
        return find_cold_start(self.trace, self.overheads, windows)

    def model_share(self, *others: str) -> float:
        """Return the model's part of the host's time in an unrecorded step, 0 to 1; 1 if it is unknown.

        Args:
            others: Phases that are no part of that time.
        """
        phases = self.trace.unrecorded_phase_ns
        whole = sum(ns for name, ns in phases.items() if name not in others)
        return sum(phases.get(name, 0.0) for name in _OF_MODEL) / whole if whole else 1.0

    @cached_property
    def host_calls(self) -> HostCalls:
        """The calls in which the host waits for the device, or computes by itself."""
        first, last = self._replayed
        return find_host_calls(self.trace, self._kinds, self.overheads, int(first[0]), int(last[-1]))

    @cached_property
    def _replayed(self) -> tuple[Int64, Int64]:
        """Starts and ends of the steps on the host that are replayed."""
        if not (self.is_whole and self.on_device):
            return self._starts, self._ends
        # What the host did before its first launch, and after the device's work, is no part of a loop.
        moments = self._links.launched_at(self.trace)
        first = int(moments[moments >= 0].min(initial=int(self._windows[0, 0])))
        return np.array([first], dtype=np.int64), np.maximum(self._windows[:1, 1], first + 1)

    @cached_property
    def savings(self) -> Savings:
        """The replay of the steps, which says what an edit saves."""
        graph = timeline(self.trace, self._links, self.host_calls, self.overheads, *self._replayed)
        return Savings(
            graph,
            HostCost(self._recording.up_to, self._cost_free()),
            self._recorded_ns,
            self.step_ns / self.inflation,
            is_known=self._step_is_known,
        )

    def _cost_free(self) -> tuple[HostTime, ...]:
        """Return the spans that take another part of their time when nothing is recorded."""
        trace, rows = self.trace, self.overheads.profilers
        spans = [HostTime(trace.start[rows], trace.end[rows])]
        draws = self.annotated(DRAW)
        unrecorded, drawn = trace.unrecorded_phase_ns.get("data", 0.0), self.lasted(draws)
        if self.on_device and 0 < unrecorded < drawn:
            spans.append(HostTime(draws.start, draws.end, unrecorded / drawn))
        return tuple(spans)

    def without_host(
        self, ns: float, spans: "Spans | None" = None, *, of: float = 0.0, recorded: bool = True
    ) -> Edit:
        """Return the edit that takes so much of a step's host time away.

        Args:
            spans: Where it is; None if it is spread, or if the host has no device to keep busy.
            of: How long the spans last in a step, in ns; 0 for their time in the recording.
            recorded: The time is that of recorded operators, which are longer than others.
        """
        if spans is not None and self.on_device:
            lasted = of or self.lasted(spans)
            keep = max(1 - ns / lasted, 0.0) if lasted else 1.0
            return Edit(host=(HostTime(spans.start, spans.end, keep),))
        share = ns / self.step_ns * (1.0 if recorded else self.inflation) if self.step_ns else 0.0
        return Edit(host_share=min(share, 1.0))

    def outside(self, *spans: "Spans | HostTime") -> HostTime:
        """Return the host's time in none of the spans, from the first step to the last."""
        starts, ends = (np.concatenate([getattr(each, side) for each in spans]) for side in ("start", "end"))
        return HostTime(*Cover(starts, ends).gaps(int(self._starts[0]), int(self._ends[-1])))

    def calls_of(self, rows: Int64) -> Int64:
        """Return the launching calls of some device events, without those that are not in the file."""
        launch = self._links.launch[np.searchsorted(self._links.event, rows)]
        return np.unique(launch[launch >= 0])

    def per_step(self, ns: float) -> float:
        return float(ns) / self.count

    def within(self, moments: Int64) -> Flags:
        """Return which moments of the host lie in a step."""
        return Cover(self._starts, self._ends).contains(moments)

    def recording(self, starts: Int64, ends: Int64) -> Int64:
        """Return the cost of recording within each span, in ns."""
        return self._recording.within(starts, ends)

    def lasted(self, spans: Spans) -> float:
        """Return how long the spans lasted, per step and without the recording's cost; nested ones once."""
        outer = outermost(spans.start, spans.end)
        starts, ends = spans.start[outer], spans.end[outer]
        return self.per_step(int(np.maximum(ends - starts - self.recording(starts, ends), 0).sum()))

    def annotated(self, *prefixes: str) -> Spans:
        """Return the host spans whose names begin with one of ``prefixes``."""
        if prefixes not in self._annotated:
            chosen = self.named(*prefixes) & self.trace.of_categories({ANNOTATION, OPERATOR})
            self._annotated[prefixes] = self.spans(chosen)
        return self._annotated[prefixes]

    def spans(self, chosen: Flags) -> Spans:
        """Return those of the chosen events that begin within a step."""
        return self.spans_of(np.flatnonzero(chosen))

    def spans_of(self, rows: Int64) -> Spans:
        """Return those of some rows that begin within a step."""
        rows = rows[self.within(self.trace.start[rows])]
        rows = rows[np.argsort(self.trace.start[rows], kind="stable")]
        return Spans.of(self.trace, rows)

    def named(self, *prefixes: str) -> Flags:
        return self.trace.of_names(lambda name: name.startswith(prefixes))

    @cached_property
    def calls(self) -> Calls:
        """The operators within the steps."""
        trace = self.trace
        rows = np.flatnonzero(self._operators)
        rows = rows[self.within(trace.start[rows])]
        rows = rows[np.lexsort((-trace.end[rows], trace.start[rows], trace.thread[rows]))]
        # A thread's times are moved past those of the thread before, so that one sweep serves all.
        moved = trace.thread[rows].astype(np.int64) * (trace.duration_ns + 1)
        starts, ends = trace.start[rows] + moved, trace.end[rows] + moved
        depth = np.arange(len(rows)) - np.searchsorted(np.sort(ends), starts, side="right")
        depth = np.maximum(depth, 0)
        lengths = ends - starts
        own = lengths.copy()
        within = self._recording.overhead(trace.start[rows], trace.end[rows])
        overhead = within.copy()
        levels = np.argsort(depth, kind="stable")
        edges = np.searchsorted(depth[levels], np.arange(int(depth.max(initial=-1)) + 2))
        for level in range(1, len(edges) - 1):
            above, here = levels[edges[level - 1] : edges[level]], levels[edges[level] : edges[level + 1]]
            at = np.searchsorted(above, here) - 1
            parents, children = above[at[at >= 0]], here[at >= 0]
            np.subtract.at(own, parents, lengths[children] + round(self._recording.event_ns))
            np.subtract.at(overhead, parents, within[children])
        own -= np.minimum(overhead, np.maximum(own, 0))
        outer = np.flatnonzero(depth == 0)
        gaps = np.append(starts[outer][1:], 0) - ends[outer]
        over, following = trace.end[rows[outer]], np.append(trace.start[rows[outer]][1:], 0)[: len(outer)]
        disturbed = self._recording.overhead(over, np.maximum(following, over))
        same = np.append(trace.thread[rows[outer]][1:] == trace.thread[rows[outer]][:-1], [False])[
            : len(outer)
        ]
        between, gap = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        gap[outer] = np.where(same, np.clip(gaps, 0, MAX_BETWEEN_NS), 0)
        recorded = round(self._recording.outermost_ns)
        between[outer] = np.where(same, np.clip(gaps - disturbed, recorded, MAX_BETWEEN_NS) - recorded, 0)
        return Calls(rows, depth, own, between, gap)

    @cached_property
    def outer(self) -> Outer:
        """The outermost of the operators within the steps."""
        calls = self.calls
        places = np.flatnonzero(calls.depth == 0)
        stops = np.append(places[1:], len(calls))[: len(places)]
        work, overhead = (np.append(0, np.cumsum(each)) for each in (calls.work_ns, calls.overhead_ns))
        return Outer(
            calls.row[places], places, work[stops] - work[places], overhead[stops] - overhead[places]
        )

    @cached_property
    def device_rows(self) -> Int64:
        """The rows of device events that began within the steps, on the clock of the steps' times."""
        return self.in_steps(np.flatnonzero(self.trace.of_categories(DEVICE)))

    @property
    def all_device_rows(self) -> Int64:
        """The rows of all device events: a host that runs ahead launches in a step what runs after it."""
        return self._links.event

    def in_steps(self, rows: Int64) -> Int64:
        """Return those of some device events that are among `device_rows`."""
        return rows[Cover(self._windows[:, 0], self._windows[:, 1]).contains(self.trace.start[rows])]

    @cached_property
    def communication(self) -> Int64:
        """Those of `all_device_rows` that are communication kernels."""
        return np.sort(self._device.rows[self._device.comm])

    def exposed(self, rows: Int64, beside: Int64) -> float:
        """Return the time of a step that some device events cover and none of the others do, in ns."""
        trace = self.trace
        others = Cover(trace.start[beside], trace.end[beside])
        return self.per_step((others | Cover(trace.start[rows], trace.end[rows])).length - others.length)

    def launched_by(self, operators: Int64) -> Int64:
        """Return the device events that an operator in ``operators`` launched itself."""
        chosen: Int64 = self._links.event[np.isin(self._links.operator, operators)]
        return chosen

    def operator_of(self, events: Int64) -> Int64:
        """Return the row of the operator that launched each of some device events, -1 for none."""
        return self._links.operator[np.searchsorted(self._links.event, events)]
