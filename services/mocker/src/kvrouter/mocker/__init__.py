"""A simulated LLM engine: the engine model, and the worker that serves it."""
