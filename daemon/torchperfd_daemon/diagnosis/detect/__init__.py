"""Detectors: each reads a stream of one kind of measurement and detects one kind of problem.

They are pure and of fixed size: no clock, no I/O, and the same work at every step.
"""

from torchperfd_daemon.diagnosis.detect.onset import Onset as Onset
from torchperfd_daemon.diagnosis.detect.onset import OnsetDetector as OnsetDetector
from torchperfd_daemon.diagnosis.detect.straggler import Doing as Doing
from torchperfd_daemon.diagnosis.detect.straggler import RankWork as RankWork
from torchperfd_daemon.diagnosis.detect.straggler import Stall as Stall
from torchperfd_daemon.diagnosis.detect.straggler import StallDetector as StallDetector
from torchperfd_daemon.diagnosis.detect.straggler import StepTimes as StepTimes
from torchperfd_daemon.diagnosis.detect.straggler import Straggler as Straggler
from torchperfd_daemon.diagnosis.detect.straggler import find_stragglers as find_stragglers
from torchperfd_daemon.diagnosis.detect.trends import Growth as Growth
from torchperfd_daemon.diagnosis.detect.trends import GrowthDetector as GrowthDetector
from torchperfd_daemon.diagnosis.detect.trends import PeriodicSpikes as PeriodicSpikes
from torchperfd_daemon.diagnosis.detect.trends import Regression as Regression
from torchperfd_daemon.diagnosis.detect.trends import RegressionDetector as RegressionDetector
from torchperfd_daemon.diagnosis.detect.trends import Slope as Slope
from torchperfd_daemon.diagnosis.detect.trends import SpikeCause as SpikeCause
from torchperfd_daemon.diagnosis.detect.trends import SpikeDetector as SpikeDetector
from torchperfd_daemon.diagnosis.detect.trends import find_period as find_period
from torchperfd_daemon.diagnosis.detect.trends import theil_sen as theil_sen
