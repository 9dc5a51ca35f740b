"""Collectors: each samples one thing about the node, in a file and a thread of its own."""
