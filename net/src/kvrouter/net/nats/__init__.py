"""NATS: where it is, a client for it, its connections and streams."""
