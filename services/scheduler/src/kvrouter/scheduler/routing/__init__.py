"""From a request context to a decision, and what is remembered of it."""
