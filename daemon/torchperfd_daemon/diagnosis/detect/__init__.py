"""Detectors: each reads a stream of one kind of measurement and detects one kind of problem.

They are pure and of fixed size: no clock, no I/O, and the same work at every step.
"""

from torchperfd_daemon.diagnosis.detect.growth import Growth, GrowthDetector, Slope, theil_sen
from torchperfd_daemon.diagnosis.detect.onset import Onset, OnsetDetector
from torchperfd_daemon.diagnosis.detect.regression import Regression, RegressionDetector
from torchperfd_daemon.diagnosis.detect.spikes import PeriodicSpikes, SpikeCause, SpikeDetector, find_period
from torchperfd_daemon.diagnosis.detect.stall import Doing, Stall, StallDetector, StepTimes
from torchperfd_daemon.diagnosis.detect.straggler import RankWork, Straggler, find_stragglers

__all__ = [
    "Doing",
    "Growth",
    "GrowthDetector",
    "Onset",
    "OnsetDetector",
    "PeriodicSpikes",
    "RankWork",
    "Regression",
    "RegressionDetector",
    "Slope",
    "SpikeCause",
    "SpikeDetector",
    "Stall",
    "StallDetector",
    "StepTimes",
    "Straggler",
    "find_period",
    "find_stragglers",
    "theil_sen",
]
