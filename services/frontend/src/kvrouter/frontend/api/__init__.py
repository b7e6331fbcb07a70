"""The Frontend's gRPC and HTTP APIs, and the validation of their requests."""
