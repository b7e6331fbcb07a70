"""Ingest of events: from a stream with JetStream (durable transport), or directly with Core NATS."""
