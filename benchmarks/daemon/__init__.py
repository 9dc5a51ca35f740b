"""What the daemon costs its node: idle, scraped, flooded, and at ten samples a second.

The daemon is a real process on a fake driver with eight GPUs, read through the real binding;
the ranks are separate processes that send a client's messages over the real socket.
"""
