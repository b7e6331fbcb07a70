"""The state of a rank's cache, its numbered events, and their batches."""
