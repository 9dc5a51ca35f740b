"""A device that exists in time only: streams, events and NCCL's kind of collectives, for jobs on CPUs.

Nothing is computed on it. Work on it takes a given time, on threads that sleep, while the host goes on: so
the waits of a job lie where they lie on GPUs, on the device and in whatever call synchronises. What is real:
torch's own code above it (DDP, FSDP2), the client's hooks and marks, and the ranks' waiting
for each other.
"""

from benchmarks.simulated_device.device import Device, Event, Stream
from benchmarks.simulated_device.installation import BACKEND, install, installed

__all__ = ["BACKEND", "Device", "Event", "Stream", "install", "installed"]
