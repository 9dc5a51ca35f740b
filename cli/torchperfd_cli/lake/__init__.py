"""Reading of the lake: a copy of its objects in DuckDB on this machine, and views over it."""
