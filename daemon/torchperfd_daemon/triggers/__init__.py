"""Triggers: rules that capture, or tell stacks, when something happens; and glances at intervals."""

from torchperfd_daemon.triggers.actions import Actions
from torchperfd_daemon.triggers.quota import TriggerCounts
from torchperfd_daemon.triggers.rules import Action, Plan, Rule, Schedule, When
from torchperfd_daemon.triggers.runner import Runner

__all__ = ["Action", "Actions", "Plan", "Rule", "Runner", "Schedule", "TriggerCounts", "When"]
