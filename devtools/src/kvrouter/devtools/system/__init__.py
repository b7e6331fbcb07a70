"""A whole system as processes on loopback ports, NATS and etcd included."""
