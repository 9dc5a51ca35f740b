"""What ``serve --demo`` shows: GPUs, ranks and owners that do not exist."""

from torchperfd_daemon.simulated.gpus import SimulatedGpuCollector as SimulatedGpuCollector
from torchperfd_daemon.simulated.owners import SimulatedOwners as SimulatedOwners
from torchperfd_daemon.simulated.ranks import SimulatedRanks as SimulatedRanks
