"""The index of one component, and what batches, dumps and repairs do to it."""
