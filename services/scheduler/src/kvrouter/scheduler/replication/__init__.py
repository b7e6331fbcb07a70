"""Exchange of bookings with the other Schedulers of a component, over NATS or gRPC."""
