"""Captures: the agreement among ranks, and the directory where traces are kept."""
