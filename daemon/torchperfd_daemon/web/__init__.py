"""The daemon's HTTP side: the metrics page, the live page and its interface, TLS and users."""
