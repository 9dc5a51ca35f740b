"""The process of the daemon: its parts, started and stopped in order; its listeners and samplers."""
