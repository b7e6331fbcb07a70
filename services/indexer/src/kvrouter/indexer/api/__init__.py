"""The Indexer's gRPC API: queries, status and operator calls."""
