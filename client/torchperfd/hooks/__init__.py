"""The hooks: where torchperfd touches torch. Each can be undone exactly.

A hook writes an event and does nothing else: what an event means is found out later,
elsewhere. It costs a fraction of a microsecond, lets no exception of ours out, and does
nothing on other threads or in forked children. Each stands alone: one that this torch has
no place for is off, and the others are not.
"""
