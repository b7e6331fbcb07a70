"""Reads events: from the stream with JetStream, or as they come with Core NATS."""
