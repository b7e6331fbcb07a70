"""A whole system as processes on loopback ports, with NATS and etcd."""
