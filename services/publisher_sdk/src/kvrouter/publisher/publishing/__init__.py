"""From an engine's calls to batches on NATS."""
