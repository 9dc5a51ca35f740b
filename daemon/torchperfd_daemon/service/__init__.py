"""The gRPC services: sessions of training processes, and control by people and programs."""
