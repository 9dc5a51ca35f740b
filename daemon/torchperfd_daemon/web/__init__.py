"""The daemon's HTTP side: the metrics page, its TLS and its users."""
