"""What client, daemon and commands share: names, units, limits and texts of each concept, once."""
