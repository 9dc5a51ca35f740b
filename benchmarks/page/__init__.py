"""What the live page weighs, and how fast it is."""
