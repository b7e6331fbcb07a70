"""Publishes events: from an engine's calls to batches on NATS."""
