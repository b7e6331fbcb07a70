"""What the SDK and the services share of the network: etcd, NATS, gRPC, and the decoding of what comes over them."""
