"""Training jobs with one known fault each, and how often the daemon's verdict on them is right."""
