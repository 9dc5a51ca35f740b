"""Diagnosis: from what ranks measured to a verdict. Pure: data in, dataclass out."""

from torchperfd_daemon.diagnosis.verdict import Cause, RankProfile, Verdict, diagnose

__all__ = ["Cause", "RankProfile", "Verdict", "diagnose"]
