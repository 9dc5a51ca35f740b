"""A compiled loop in a process of its own, which trains some steps on request.

    python -m benchmarks.gpu_proof.turns_worker bare|attached

What is compiled depends on whether hooks are there: with the client and without it take two processes. Reads
a number of steps per line, and answers with one line of JSON: seconds of a step, by the wall clock and of the
training thread's CPU.
"""

import json
import sys
from contextlib import nullcontext

import torch
from benchmarks.gpu_proof.analysed_capture import attached
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import WARM_UP, Training, gpt


def main() -> int:
    machine = Machine(is_rehearsal=not torch.cuda.is_available())
    training = Training(gpt(machine), machine, wrap=lambda model: torch.compile(model, backend="cudagraphs"))
    with attached(training.workload.model) if sys.argv[1] == "attached" else nullcontext():
        training.run(3 * WARM_UP)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(training.timed(int(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
