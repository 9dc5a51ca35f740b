"""The daemon's gRPC side: who connects, which requests are refused, and the server on the socket."""
