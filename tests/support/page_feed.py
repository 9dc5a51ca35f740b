"""Made-up documents of the daemon's HTTP interface: a run of any number of ranks, one of them slow."""

import math
import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from torchperfd.model.host_memory import HostMemory
from torchperfd.model.messages import fill
from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2

PHASES: Final = ("data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "other")
_SHARES: Final = (0.02, 0.01, 0.3, 0.02, 0.5, 0.06, 0.01, 0.02)
_WAIT: Final = "collective_wait"
_KEPT_STEPS: Final = 256
_GIB: Final = 1024**3
_COURSE: Final = tuple(range(2 * _GIB, 6 * _GIB, _GIB))
_MEMORY: Final = asdict(HostMemory(6 * _GIB, 7 * _GIB, 2 * _GIB, 0.02 * _GIB, 90.0, _COURSE))

HOSTILE_RUN: Final = '<img src=x onerror="document.title=1">&"'
"""A run's name that would be markup if a page took it for that."""


@dataclass
class PageFeed:
    """A node with one run.

    Attributes:
        silent: Ranks that have lost their connection.
        remote: Ranks on another node, which only documents of the fleet have.
        slow: A rank that works longer than its peers, and how much longer.
        state: Of the run.
        listed: How many captures are in the list; the others are there, too.
        streams: How many streams of events are open.
        forgotten: Whether the run has ended so long ago that the daemon has a row of it only.
    """

    run: str = "demo"
    ranks: int = 8
    seconds: int = 600
    step_seconds: float = 0.2
    silent: frozenset[int] = frozenset()
    remote: int = 0
    slow: int = 5
    excess: float = 0.35
    began: float = field(default_factory=lambda: time.time() - 600)
    captures: list[dict[str, Any]] = field(default_factory=list)
    state: str = "training"
    listed: int = 100
    forgotten: bool = False
    streams: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether no rank trains any more."""
        return self.state in ("finished", "gone")

    def info(self) -> dict[str, Any]:
        """Return the document of ``info``."""
        return {"schema": "torchperfd.info/1", "node": "vm", "fleet": self.remote > 0, "view": self._view()}

    def runs(self, fleet: bool = False) -> dict[str, Any]:
        """Return the document of ``runs``."""
        return {
            "schema": "torchperfd.ps/1",
            "node": "vm",
            "runs": [self._run(fleet)],
            "finished": [self._ended("bert-16")],
            "view": self._view(fleet),
        }

    def run_document(self, fleet: bool = False) -> dict[str, Any]:
        """Return the document of ``runs/{run}``."""
        if self.forgotten:
            return {"schema": "torchperfd.run/1", "run": self._ended(self.run), "view": self._view()}
        return {
            "schema": "torchperfd.run/1",
            "run": self._run(fleet),
            "verdict": self._verdict(),
            "goodput": self._goodput(),
            "captures": self.captures,
            "marks": self._marks(),
            "phases": [*PHASES, _WAIT],
            "view": self._view(fleet),
        }

    def ranks_document(self) -> dict[str, Any]:
        """Return the document of ``runs/{run}/ranks``."""
        step = self.step_seconds * (1 + self.excess)
        rows = []
        for rank in range(self.ranks):
            own = self._own(rank, 0)
            rows.append(
                {
                    "rank": rank,
                    "node": "vm",
                    "pid": 1000 + rank,
                    "state": "training",
                    "stalled_seconds": None,
                    "coordinates": "",
                    "steps": 3000,
                    "window_steps": 128,
                    "step_seconds": step,
                    "phase_seconds": self._phases(own, step - own),
                    "own_seconds": own,
                    "behind_seconds": own - self.step_seconds,
                    "behind_ratio": own / self.step_seconds - 1,
                    "slow": {"rank": rank, "phase": "backward"} if rank == self.slow else None,
                }
            )
        run = {
            "run": self.run,
            "world_size": self.ranks,
            "waits_measured": True,
            "step_seconds": step,
            "ranks": rows,
        }
        return {"schema": "torchperfd.ranks/1", "runs": [run], "view": self._view()}

    def history(self, ranks: list[int] | None = None) -> dict[str, Any]:
        """Return the document of ``runs/{run}/history``."""
        now = int(time.time())
        here = list(range(self.ranks))
        chosen = here[:64] if ranks is None else ranks
        entries = []
        for rank in chosen:
            at = [now - self.seconds + second for second in range(self.seconds)]
            if rank in self.silent:
                at = at[: self.seconds // 2]
            own = [self._own(rank, second) for second in at]
            step = [max(value, self.step_seconds * (1 + self.excess)) for value in own]
            entries.append(
                {
                    "rank": rank,
                    "node": "vm",
                    "state": "training",
                    "seconds": {
                        "unix_seconds": at,
                        "steps": [round(1 / value) for value in step],
                        "step_seconds": step,
                        "longest_seconds": step,
                        "own_seconds": own,
                        "wait_seconds": [whole - part for whole, part in zip(step, own, strict=True)],
                        "phase_seconds": self._columns(own, step),
                    },
                    "steps": self.steps(rank, 3000 - _KEPT_STEPS, _KEPT_STEPS),
                }
            )
        return {
            "schema": "torchperfd.history/1",
            "run": self.run,
            "world_size": self.ranks,
            "phases": [*PHASES, _WAIT],
            "ranks": entries,
            "across": {"outliers": [{"rank": self.slow, "excess_seconds": 0.07, "seconds_above": 540}]},
            "marks": self._marks(),
            "ranks_here": here,
            "view": self._view(),
        }

    def steps(self, rank: int, first: int, count: int) -> dict[str, Any]:
        """Return columns of single steps, which end now."""
        own = [self._own(rank, first + index) for index in range(count)]
        step = [max(value, self.step_seconds * (1 + self.excess)) for value in own]
        now = time.time()
        return {
            "first_step": first,
            "end_unix_seconds": [now - (count - 1 - index) * step[0] for index in range(count)],
            "step_seconds": step,
            "own_seconds": own,
            "wait_seconds": [whole - part for whole, part in zip(step, own, strict=True)],
            "phase_seconds": self._columns(own, step),
        }

    def goodput(self) -> dict[str, Any]:
        """Return the document of ``runs/{run}/goodput``."""
        return {"schema": "torchperfd.goodput/1", "runs": [self._goodput()], "view": self._view()}

    def captures_document(self) -> dict[str, Any]:
        """Return the document of ``captures``."""
        return {
            "schema": "torchperfd.captures/1",
            "directory": "",
            "total": len(self.captures),
            "captures": self.captures[: self.listed],
            "view": self._view(),
        }

    def node(self) -> dict[str, Any]:
        """Return the document of ``node``."""
        gpus = [
            {
                "gpu": str(index),
                "model": "Simulated H100",
                "utilization_ratio": 0.9,
                "memory_used_bytes": 61 * _GIB,
                "memory_total_bytes": 80 * _GIB,
                "power_watts": 560,
                "temperature_celsius": 64,
                "runs": [self.run],
            }
            for index in range(min(8, self.ranks))
        ]
        finding = {
            "check": "clock",
            "subject": "node",
            "problem": "nothing keeps the clock right",
            "why": "steps and traces of several nodes cannot be laid side by side",
            "fix": "`sudo timedatectl set-ntp true`",
        }
        return {
            "schema": "torchperfd.node/1",
            "node": "vm",
            "version": "0.2.0",
            "revision": "6ba749a4c0de",
            "cpu": {"utilization_ratio": 0.4, "count": 64},
            "memory": {"used_bytes": 12 * _GIB, "total_bytes": 64 * _GIB},
            "pressure": [{"resource": "cpu", "kind": "some", "ratio": 0.12}],
            "disks": [
                {
                    "disk": "nvme0n1",
                    "read_bytes_per_second": 4e8,
                    "written_bytes_per_second": 1e6,
                    "busy_ratio": 0.4,
                }
            ],
            "network": [
                {"interface": "eth0", "received_bytes_per_second": 1e7, "sent_bytes_per_second": 1e7}
            ],
            "gpus": gpus,
            "collectors": [{"collector": "nvml", "healthy": False, "reason": "no driver"}],
            "captures_disk": {"free_bytes": 90 * _GIB, "total_bytes": 100 * _GIB},
            "doctor": {"schema": "torchperfd.doctor/1", "findings": [finding], "skipped": []},
            "view": self._view(),
        }

    def _run(self, fleet: bool) -> dict[str, Any]:
        step = self.step_seconds * (1 + self.excess)
        now = time.time()
        slow = {"p50_seconds": 1.2 * step, "p95_seconds": 1.4 * step}
        usual = {"p50_seconds": step, "p95_seconds": 1.1 * step}
        rows = [
            {
                "rank": rank,
                "local_rank": rank,
                "node": "vm" if rank < self.ranks else "vm2",
                "pid": 1000 + rank,
                "state": "gone" if rank in self.silent else self.state,
                "stalled_seconds": None,
                "connected": rank not in self.silent and not self.has_ended,
                "steps": 3000,
                "step_seconds": step,
                "step_p50_seconds": (slow if rank == self.slow else usual)["p50_seconds"],
                "step_p95_seconds": (slow if rank == self.slow else usual)["p95_seconds"],
                "phase_seconds": self._phases(self._own(rank, 0), 0.05),
                "last_step_unix_seconds": now - (300 if rank in self.silent else 0.4),
                "dropped_steps": 0,
                "gpu": str(rank),
                "host_memory": _MEMORY,
                "cuda": {"allocated_bytes": 52 * _GIB, "reserved_bytes": 60 * _GIB, "peak_bytes": 58 * _GIB},
                "loader": {"workers": 4, "ready": 7},
            }
            for rank in range(self.ranks + (self.remote if fleet else 0))
        ]
        return {
            "run": self.run,
            "job_name": "demo",
            "world_size": self.ranks + self.remote,
            "ranks": rows,
            "state": self.state,
            "step_seconds": step,
            "step_percentiles": {**usual, "slowest": {"rank": self.slow, **slow}},
            "steps_per_second": 1 / step,
            "samples_per_second": 8 * self.ranks / step,
            "goodput_ratio": 0.874,
            "verdict": self._verdict(),
            "sparkline": self._sparkline(step),
            "gpus": list(range(min(8, self.ranks))),
            "captures_in_progress": [
                each["capture_id"] for each in self.captures if each["state"] == "armed"
            ],
            "first_seen_unix_seconds": self.began,
        }

    def _ended(self, run: str) -> dict[str, Any]:
        return {
            "run": run,
            "job_name": "bert",
            "world_size": 8,
            "state": "finished",
            "started_unix_seconds": self.began - 9000,
            "ended_unix_seconds": self.began - 1800,
            "steps": 20_311,
            "step_seconds": 0.35,
            "step_percentiles": {
                "p50_seconds": 0.34,
                "p95_seconds": 0.38,
                "slowest": {"rank": 2, "p50_seconds": 0.34, "p95_seconds": 0.38},
            },
            "goodput_ratio": 0.81,
            "verdict": None,
            "sparkline": self._sparkline(0.35),
        }

    def _sparkline(self, step: float) -> dict[str, Any]:
        values = [step * (1 + 0.05 * math.sin(at / 3)) if at > 8 else None for at in range(60)]
        return {"until_unix_seconds": time.time(), "interval_seconds": 10, "step_seconds": values}

    def _verdict(self) -> dict[str, Any]:
        cost = self.step_seconds * self.excess
        verdict = control_pb2.Verdict(
            run=self.run,
            cause="slow rank",
            node="vm",
            rank=self.slow,
            phase="backward",
            evidence=f"rank {self.slow} does {1000 * cost:.0f} ms more work a step than its peers",
            cost_seconds_per_step=cost,
            step_seconds=self.step_seconds + cost,
            window_seconds=10.0,
            onset_step=1200,
            next_command=f"torchperfd capture --run {self.run!r} --ranks {self.slow}",
        )
        whole, step = verdict.step_seconds, self.step_seconds
        parts = [
            Part(PartKind.LATE_RANK, "", cost, self.slow),
            Part(PartKind.EXCHANGE, "", (1 - sum(_SHARES)) * step),
            *(
                Part(PartKind.COMPUTING, name, share * step)
                for name, share in zip(PHASES, _SHARES, strict=True)
            ),
        ]
        parts.sort(key=lambda part: -part.seconds)
        account = Account(whole, whole, tuple(parts), (Part(PartKind.DATA, "", 0.05 * whole),))
        fill(verdict.account, account)
        verdict.note = (
            "busy node: everything takes 1.4 times as long; 71% of that wait is for your own threads"
        )
        verdict.others.add(
            cause="memory pressure",
            rank=-1,
            evidence="memory grows by 8.2 MiB/s and is full in 39 min; host memory of rank 0",
            fix="see which objects are kept",
        )
        return verdict_to_document(verdict)

    def _goodput(self) -> dict[str, Any]:
        buckets = {
            "start_up": 90.0,
            "productive": 4200.0,
            "data_wait": 130.0,
            "communication_wait": 380.0,
            "stall": 0.0,
        }
        return {
            "run": self.run,
            "since_unix_seconds": self.began,
            "until_unix_seconds": time.time(),
            "restarts": 0,
            "goodput_ratio": 0.874,
            "bucket_seconds": buckets,
            "lost_gpu_hours": {"communication_wait": 0.106, "data_wait": 0.036, "start_up": 0.025},
            "ranks": [],
        }

    def _marks(self) -> list[dict[str, Any]]:
        now = time.time()
        return [
            {
                "kind": "checkpoint",
                "unix_seconds": now - 420,
                "end_unix_seconds": now - 417,
                "rank": None,
                "text": "",
            },
            {
                "kind": "validation",
                "unix_seconds": now - 200,
                "end_unix_seconds": now - 195,
                "rank": None,
                "text": "",
            },
            {"kind": "verdict", "unix_seconds": now - 90, "rank": self.slow, "text": "slow rank"},
        ]

    def _view(self, fleet: bool = False) -> dict[str, Any]:
        now = time.time()
        return {
            "scope": "fleet" if fleet else "node",
            "node": "vm",
            "at_unix_seconds": now,
            "window_seconds": 600.0,
            "newest_unix_seconds": now - 0.4,
            "age_seconds": 0.4,
            "ranks_known": self.ranks,
            "ranks_reporting": self.ranks - len(self.silent),
            "ranks_elsewhere": 0,
            "unreachable": [],
            "access": "owner",
        }

    def _own(self, rank: int, at: int) -> float:
        noise = random.Random(rank * 100_003 + at).uniform(-0.04, 0.04)
        return self.step_seconds * (1 + noise + (self.excess if rank == self.slow else 0))

    def _phases(self, own: float, wait: float) -> dict[str, float]:
        parts = {name: own * share for name, share in zip(PHASES, _SHARES, strict=True)}
        return parts | {_WAIT: max(0.0, wait)}

    def _columns(self, own: list[float], step: list[float]) -> dict[str, list[float]]:
        columns = {
            name: [value * share for value in own] for name, share in zip(PHASES, _SHARES, strict=True)
        }
        return columns | {_WAIT: [max(0.0, whole - part) for whole, part in zip(step, own, strict=True)]}
