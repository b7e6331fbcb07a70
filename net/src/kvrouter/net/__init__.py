"""Network code shared by the SDK and the services: etcd leases and watches, NATS, gRPC options, and decoding."""
