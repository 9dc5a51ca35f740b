"""Collectors: each samples one thing about the node, in a file of its own."""
