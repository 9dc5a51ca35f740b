"""Steps: events of the training thread become phases, steps and totals."""
