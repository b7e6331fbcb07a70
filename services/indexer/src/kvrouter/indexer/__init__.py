"""The Indexer: keeps who holds which blocks, from the events that workers publish, and answers with facts."""
