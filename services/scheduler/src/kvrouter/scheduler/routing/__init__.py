"""From a request context to a decision and its booking; past decisions."""
