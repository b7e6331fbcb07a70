"""``kvrouter index …``: inspects and corrects the index of an Indexer."""
