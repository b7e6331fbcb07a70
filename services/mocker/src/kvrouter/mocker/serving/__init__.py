"""Serves the simulated engine over HTTP: what the vLLM and the SGLang server have in common."""
