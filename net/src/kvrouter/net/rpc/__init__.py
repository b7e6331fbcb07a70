"""gRPC servers of services and workers."""
