"""What commands and HTTP show of runs, ranks and nodes: numbers for tables, and the versioned documents."""
