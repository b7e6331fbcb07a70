"""The HTTP API of vLLM."""
