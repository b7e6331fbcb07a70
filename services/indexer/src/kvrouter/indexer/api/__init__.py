"""The Indexer's contract: queries, status, operators' calls."""
