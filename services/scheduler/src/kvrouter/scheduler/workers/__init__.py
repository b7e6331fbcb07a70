"""The registered ranks of a component, and which of them may serve a request."""
