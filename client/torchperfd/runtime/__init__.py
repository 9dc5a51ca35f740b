"""The parts of an attached client, and the session with its daemon."""
