"""A service process: shared resources, hosting of its services, start and stop."""
