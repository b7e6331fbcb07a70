"""Records the requests that pass, for simulation and replay."""
