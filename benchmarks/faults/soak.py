"""A long healthy run that saves and validates a lot: how often the daemon takes that for a fault.

    python -m benchmarks.faults.soak [--minutes 15] [--model mlp-ddp]

Four gloo ranks, one of which writes a checkpoint of 10 to 200 ms at every tenth step, one of 20 s every
minute and one of a minute; now and then all validate, once for a minute. The daemon is asked for its verdict
twice a second. Exits 1 if it ever reports a hang, or names anything but its checkpoints.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Final

import grpc
from benchmarks.faults import catalog
from benchmarks.faults.catalog import HANG, SAVES_A_LOT
from benchmarks.faults.trial import POLL_SECONDS, ask, journals, running
from tests.support.node import Node

from torchperfd.v1 import control_pb2_grpc
from torchperfd_daemon.diagnosis.verdict import Cause

_SEED: Final = 1
_FINE: Final = frozenset({Cause.NONE.value, Cause.CHECKPOINT.value})
_WARM_SECONDS: Final = 30.0
"""By then the first verdict has been found; a run of which nothing is known yet is no fault."""


def soak(minutes: float, model: str) -> bool:
    """Run, print the count of each answer; return whether all of them were right."""
    plan = replace(catalog.plan(SAVES_A_LOT, model, _SEED), onset=sys.maxsize)
    said: Counter[str] = Counter()
    odd: list[str] = []
    node = Node()
    try:
        node.start_daemon()
        with running(plan, node) as job, grpc.insecure_channel(f"unix:{node.socket}") as channel:
            control = control_pb2_grpc.ControlStub(channel)
            began = time.monotonic()
            while (passed := time.monotonic() - began) < 60 * minutes:
                if job.poll() is not None:
                    print(f"FAILED: the job ended with {job.returncode}")
                    return False
                time.sleep(POLL_SECONDS)
                if passed < _WARM_SECONDS:
                    continue
                answer = ask(control)
                said[answer.cause] += 1
                if answer.cause not in _FINE:
                    odd.append(f"after {passed:.0f} s: {answer.cause}: {answer.evidence}")
            steps = {rank: len(made) for rank, made in journals(plan, node).items()}
    finally:
        node.close()
    print(f"{minutes:.0f} min, {plan.ranks} ranks of {model}, {min(steps.values())} steps")
    for cause, count in said.most_common():
        print(f"{cause:<24} {count:>6} answers")
    print(
        f"alarms: {said[HANG]} hangs, {sum(said.values()) - sum(map(said.__getitem__, _FINE))} faults in all"
    )
    for line in dict.fromkeys(odd):
        print(f"FAILED: {line}")
    return not odd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--model", choices=catalog.MODELS, default="mlp-ddp")
    options = parser.parse_args()
    return 0 if soak(options.minutes, options.model) else 1


if __name__ == "__main__":
    sys.exit(main())
