"""The simulated engine as an SGLang 0.5.23 server."""
