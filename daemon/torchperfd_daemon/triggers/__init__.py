"""Triggers: rules that capture or write stacks under a condition, and scheduled captures."""

from torchperfd_daemon.triggers.rules import Action, Actions, Plan, Rule, Schedule, TriggerCounts, When
from torchperfd_daemon.triggers.runner import Runner

__all__ = ["Action", "Actions", "Plan", "Rule", "Runner", "Schedule", "TriggerCounts", "When"]
