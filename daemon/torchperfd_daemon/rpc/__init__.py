"""The daemon's gRPC server: identification of callers, checks of requests, and the socket."""
