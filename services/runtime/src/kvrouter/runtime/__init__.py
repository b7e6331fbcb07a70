"""What every service stands on: settings, logs, discovery, NATS, gRPC, metrics, start and stop."""
