"""Reports: a rank's totals as a table and as a document; whole runs, which are kept, read again and compared.

``numbers`` computes every figure once, and ``phase_table`` makes one document of them, so that no two layouts
disagree.
"""
