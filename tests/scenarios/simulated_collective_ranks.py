"""One rank whose collectives on the simulated device are timed, while rank 1 comes late by some amounts.

torchrun … tests/scenarios/simulated_collective_ranks.py DIRECTORY SECONDS,SECONDS…
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.simulated_device import BACKEND, install

AHEAD_S = 0.1
"""What the device is behind the host, so that only its kernels decide when it comes to a collective."""


def main(directory: Path, lateness: list[float]) -> None:
    """Write when collectives began on this rank's device and how long they lasted; and what messages did."""
    torch.set_num_threads(1)
    device = install()
    dist.init_process_group(BACKEND)
    rank = dist.get_rank()
    collectives = []
    for seconds in lateness:
        dist.barrier()
        device.compute.launch_kernel(AHEAD_S + seconds * rank)
        device.communication.wait_stream(device.compute)
        begin, end = device.event(), device.event()
        begin.record(device.communication)
        dist.all_reduce(torch.ones(1), async_op=True)
        end.record(device.communication)
        end.synchronize()
        collectives.append((begin.seconds, end.seconds - begin.seconds))
    messages = []
    for seconds in lateness:
        dist.barrier()
        device.compute.launch_kernel(AHEAD_S + seconds * rank)
        arrived, ended = device.event(), device.event()
        arrived.record()
        work = dist.irecv(torch.ones(1), 0) if rank else dist.isend(torch.ones(1), 1)
        assert work is not None
        work.wait()
        ended.record()
        was_ahead = not ended.query()
        ended.synchronize()
        messages.append((arrived.seconds, ended.seconds, was_ahead))
    number = torch.tensor([7 - 7 * rank])
    (dist.recv(number, 0) if rank else dist.send(number, 1))
    measured = {"collectives": collectives, "messages": messages, "number": int(number)}
    (directory / f"rank{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [float(text) for text in sys.argv[2].split(",")])
