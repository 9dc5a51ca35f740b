"""What ``serve --demo`` shows: GPUs, ranks and owners that do not exist."""

from torchperfd_daemon.simulated.gpus import SimulatedGpuCollector
from torchperfd_daemon.simulated.owners import SimulatedOwners
from torchperfd_daemon.simulated.ranks import SimulatedRanks

__all__ = ["SimulatedGpuCollector", "SimulatedOwners", "SimulatedRanks"]
