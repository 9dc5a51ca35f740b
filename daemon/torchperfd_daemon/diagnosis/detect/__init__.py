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
from torchperfd_daemon.diagnosis.detect.straggler import find_stragglers as find_stragglers
from torchperfd_daemon.diagnosis.detect.trends import GrowthDetector as GrowthDetector
from torchperfd_daemon.diagnosis.detect.trends import Regression as Regression
from torchperfd_daemon.diagnosis.detect.trends import RegressionDetector as RegressionDetector
from torchperfd_daemon.diagnosis.detect.trends import SpikeDetector as SpikeDetector
