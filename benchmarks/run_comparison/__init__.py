"""How often a comparison of two runs is right: simulated pairs of known truth, and pairs of real runs."""
