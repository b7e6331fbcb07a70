"""How much of a prompt each rank holds: asked of an Indexer, or predicted."""
