"""One rank, as the daemon sees it: a process that sends a client's messages, without training.

    python -m benchmarks.daemon.rank SOCKET RANK STEPS_PER_SECOND REPORTS_PER_SECOND [WORLD]
    python -m benchmarks.daemon.rank SOCKET RANK --flood SECONDS

It reports twice a second while a live page shows its run, as clients do.

Prints a line once the daemon has welcomed it, and runs until its standard input closes; a flood
lasts as long as configured.
"""

import itertools
import math
import os
import select
import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any, Final

import grpc

from torchperfd.v1 import contract, session_pb2, session_pb2_grpc

PHASES: Final = {
    "data": 4,
    "h2d": 1,
    "forward": 30,
    "loss": 2,
    "backward": 50,
    "optimizer": 8,
    "zero_grad": 1,
    "other": 4,
}
"""Shares of a step, in percent."""
FLOOD_BATCH: Final = 512
WORLD: Final = 8
FREQUENT_REPORTS_PER_SECOND: Final = 2.0


class Script:
    def __init__(self, rank: int, world: int = WORLD) -> None:
        self._rank = rank
        self._world = world
        self._steps = 0
        self._ns = 0
        self._frequent_until = float("-inf")

    def on_message(self, message: session_pb2.DaemonMessage) -> None:
        if message.HasField("report_frequently"):
            self._frequent_until = time.monotonic() + message.report_frequently.seconds

    def hello(self) -> session_pb2.ClientMessage:
        with open("/proc/self/stat") as stat:  # noqa: PTH123
            start = int(stat.read().rpartition(")")[2].split()[19])
        identity = session_pb2.RankIdentity(
            run="bench",
            rank=self._rank,
            world_size=self._world,
            local_rank=self._rank,
            job_name="bench",
            node="node",
            pid_namespace=os.stat("/proc/self/ns/pid").st_ino,  # noqa: PTH116
            pid=os.getpid(),
            process_start_ticks=start,
            script="bench.py",
        )
        return session_pb2.ClientMessage(
            hello=session_pb2.Hello(
                api=session_pb2.ApiRange(min=1, max=1),
                features=[contract.FREQUENT_REPORTS],
                identity=identity,
            )
        )

    def steps(self, count: int, step_ns: int) -> session_pb2.ClientMessage:
        """Return a batch of steps that have just ended."""
        first = time.time_ns() - count * step_ns
        batch = session_pb2.StepBatch(
            count=count,
            kind=_packed([session_pb2.STEP_KIND_TRAIN] * count),
            start_ns=_packed(range(first, first + count * step_ns, step_ns)),
            duration_ns=_packed([step_ns] * count),
            phases=[
                session_pb2.PhaseColumn(phase=name, ns=_packed([step_ns * share // 100] * count))
                for name, share in PHASES.items()
            ],
        )
        self._steps += count
        self._ns += count * step_ns
        return session_pb2.ClientMessage(steps=batch)

    def account(self) -> session_pb2.ClientMessage:
        """Return the totals so far."""
        kind = session_pb2.KindAccount(
            kind=session_pb2.STEP_KIND_TRAIN,
            steps=self._steps,
            step_ns=self._ns,
            samples=32 * self._steps,
            tokens=32 * 512 * self._steps,
            micro_batches=self._steps,
            phases=[
                session_pb2.PhaseAccount(
                    phase=name,
                    calls=self._steps,
                    ns=self._ns * share // 100,
                    device_ns=self._ns * share // 100,
                    device_calls=self._steps,
                )
                for name, share in PHASES.items()
            ],
        )
        return session_pb2.ClientMessage(
            account=session_pb2.Account(
                kinds=[kind],
                recorded_steps=self._steps,
                gc=[session_pb2.GcAccount(calls=1, ns=1)],
                loader_ready=2,
                cuda=session_pb2.CudaMemory(allocated_bytes=1, reserved_bytes=1, peak_bytes=1),
                flops_per_step=1e12,
                peak_flops=1e15,
                overhead_ratio=0.001,
            )
        )

    def report(self, count: int, step_ns: int) -> session_pb2.ClientMessage:
        """Return a batch of steps that have just ended and the totals, in one message as clients do."""
        messages = [self.steps(count, step_ns), self.account()]
        return session_pb2.ClientMessage(bundle=session_pb2.Bundle(messages=messages))

    def paced(
        self, steps_per_second: float, reports_per_second: float
    ) -> Iterator[session_pb2.ClientMessage]:
        """Yield what a client sends, when it sends it, until standard input closes."""
        yield self.hello()
        yield session_pb2.ClientMessage(state=session_pb2.StateChange(state=session_pb2.RUN_STATE_TRAINING))
        began = time.time()
        while True:
            is_watched = time.monotonic() < self._frequent_until
            rate = max(FREQUENT_REPORTS_PER_SECOND, reports_per_second) if is_watched else reports_per_second
            # On the wall clock's grid, as all clients are.
            due = (math.floor(time.time() * rate) + 1) / rate
            is_extra = is_watched and bool((due * reports_per_second) % 1)
            if select.select([sys.stdin], [], [], max(0.0, due - time.time()))[0]:
                return
            ended = int((due - began) * steps_per_second) - self._steps
            if ended:
                step_ns = int(1e9 / steps_per_second)
                yield self.steps(ended, step_ns) if is_extra else self.report(ended, step_ns)

    def flood(self, seconds: float) -> Iterator[session_pb2.ClientMessage]:
        """Yield steps of a millisecond each, as fast as they are taken."""
        yield self.hello()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield self.report(FLOOD_BATCH, 1_000_000)


def _packed(values: "range | list[int]") -> bytes:
    return array("q", values).tobytes()


def main(arguments: list[str]) -> None:
    path, rank, first, second, *world = arguments
    script = Script(int(rank), *map(int, world))
    messages = (
        script.flood(float(second)) if first == "--flood" else script.paced(float(first), float(second))
    )
    goodbye = session_pb2.ClientMessage(goodbye=session_pb2.Goodbye(reason="done"))
    with grpc.insecure_channel(f"unix:{path}", options=[("grpc.http2.bdp_probe", 0)]) as channel:
        answers: Any = session_pb2_grpc.SessionStub(channel).Attach(itertools.chain(messages, (goodbye,)))
        next(answers)
        print("welcome", flush=True)
        # The daemon ends the session once it has read all of it.
        for answer in answers:
            script.on_message(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
