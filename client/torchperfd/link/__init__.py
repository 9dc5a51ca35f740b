"""Link: what this process sends to the node's daemon, and when."""
