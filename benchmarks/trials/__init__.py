"""Randomised trials: scripts that misbehave and daemons that fail, beside the same scripts alone."""
