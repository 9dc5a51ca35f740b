"""What the daemon sends to others by itself: metrics over OTLP, and Events of Kubernetes."""
