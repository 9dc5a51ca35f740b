"""Metrics: the data of the store and the samplers as Prometheus families, read at scrape time."""

from torchperfd_daemon.metrics.page import CONTENT_TYPES, MetricsPage

__all__ = ["CONTENT_TYPES", "MetricsPage"]
