"""A compiled loop in a process of its own, which trains some steps on request.

    python -m benchmarks.gpu_proof.turns_worker bare|attached

What is compiled depends on whether hooks are there: with the client and without it take two processes. Reads
a number of steps per line, and answers with one line of JSON: seconds of a step, by the wall clock and of the
training thread's CPU.
"""

import json
import sys
import time
from typing import Final

import torch
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import Training, gpt

import torchperfd

WARM_UP: Final = 3


def main() -> int:
    """Serve until stdin ends."""
    machine = Machine(is_rehearsal=not torch.cuda.is_available())
    training = Training(gpt(machine), machine, wrap=lambda model: torch.compile(model, backend="cudagraphs"))
    client = torchperfd.attach(model=training.workload.model) if sys.argv[1] == "attached" else None
    training.run(3 * WARM_UP)
    print("ready", flush=True)
    for line in sys.stdin:
        steps = int(line)
        training.run(WARM_UP)
        wall, cpu = time.perf_counter(), time.thread_time()
        training.run(steps)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        print(json.dumps([wall / steps, cpu / steps]), flush=True)
    if client is not None:
        client.detach()
    return 0


if __name__ == "__main__":
    sys.exit(main())
