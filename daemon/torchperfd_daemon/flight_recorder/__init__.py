"""Reads the Flight Recorder dumps of a dead job, and names the rank that the others waited for.

torch writes one for each rank after a timeout: its newest collectives, and whether each has ended.
"""

from torchperfd_daemon.flight_recorder.dump import Call as Call
from torchperfd_daemon.flight_recorder.dump import Dump as Dump
from torchperfd_daemon.flight_recorder.dump import is_dump as is_dump
from torchperfd_daemon.flight_recorder.dump import load as load
from torchperfd_daemon.flight_recorder.files import Found as Found
from torchperfd_daemon.flight_recorder.files import find_dumps as find_dumps
from torchperfd_daemon.flight_recorder.files import read_dumps as read_dumps
from torchperfd_daemon.flight_recorder.report import SCHEMA as SCHEMA
from torchperfd_daemon.flight_recorder.report import render_text as render_text
from torchperfd_daemon.flight_recorder.report import sentence as sentence
from torchperfd_daemon.flight_recorder.report import to_dict as to_dict
from torchperfd_daemon.flight_recorder.verdict import Verdict as Verdict
from torchperfd_daemon.flight_recorder.verdict import judge as judge
