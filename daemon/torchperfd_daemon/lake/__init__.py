"""History in an object store: rows of each node, journaled on its disk, then sent as immutable objects."""
