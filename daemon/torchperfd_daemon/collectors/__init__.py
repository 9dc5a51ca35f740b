"""Collectors: each samples one thing about the node, and returns it as metrics."""
