"""A service process: what its services share, how they are served, start and stop."""
