"""The fleet: connections between the daemons of all nodes, so that each can answer for the whole job."""
