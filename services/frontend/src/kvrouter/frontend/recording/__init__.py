"""Records requests for simulation and replay."""
