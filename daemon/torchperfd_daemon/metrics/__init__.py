"""Metrics: the data of the store and the samplers as Prometheus families, read at scrape time."""
