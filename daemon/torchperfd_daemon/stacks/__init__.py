"""Merges the stacks of a run's ranks and finds the ranks that differ. Pure, without I/O."""
