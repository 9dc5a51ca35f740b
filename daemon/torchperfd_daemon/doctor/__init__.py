"""The doctor: what on this node keeps training from being as fast as it could be."""

from torchperfd_daemon.doctor.checks import Finding, examine
from torchperfd_daemon.doctor.facts import Facts, ReportedFacts
from torchperfd_daemon.doctor.reading import read_facts
from torchperfd_daemon.doctor.report import SCHEMA, render_text, to_dict

__all__ = ["SCHEMA", "Facts", "Finding", "ReportedFacts", "examine", "read_facts", "render_text", "to_dict"]
