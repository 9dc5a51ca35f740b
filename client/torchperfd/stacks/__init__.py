"""Stacks of threads: which line of the script, and of a loader's worker, runs at a moment."""
