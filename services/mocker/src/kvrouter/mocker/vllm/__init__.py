"""The simulated engine as a vLLM 0.33 server."""
