"""How often the detectors are right, on noise made up and recorded."""
