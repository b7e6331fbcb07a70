"""The index of one component, and how event batches, dumps and repairs change it."""
