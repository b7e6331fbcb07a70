"""What clients call: gRPC and HTTP, and the checks of their requests."""
