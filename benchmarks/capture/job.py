"""A rank that trains until its standard input closes, for captures from outside.

python -m benchmarks.capture.job
"""

import select
import sys

import torch
from benchmarks.capture.worker import Loop

import torchperfd


def main() -> None:
    torch.set_num_threads(1)
    client = torchperfd.attach(run="bench")
    loop = Loop()
    print("training", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        loop.step()
    client.detach()


if __name__ == "__main__":
    main()
