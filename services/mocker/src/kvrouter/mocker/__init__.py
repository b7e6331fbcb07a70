"""A simulated LLM engine: the pure model of one, and the worker that serves it."""
