"""The configuration of ``torchperfd serve``: its options, where they are read, and what is in force."""
