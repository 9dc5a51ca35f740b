"""Checks the model of a step against an oracle: jobs that are simulated apart from it, with known faults."""
