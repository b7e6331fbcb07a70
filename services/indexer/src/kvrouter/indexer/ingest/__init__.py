"""Ingest of events: from a stream with JetStream (durable transport), or live ones, from Core NATS or this process."""
