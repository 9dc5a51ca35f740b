"""Triggers: rules that capture or write stacks under a condition, and scheduled captures."""
