"""What people read: documents of a few kinds of blocks, laid out for terminals, as Markdown, CSV and HTML.

Reports and commands build a :class:`~torchperfd.document.blocks.Document` and know no format.
"""
