"""The Indexer's APIs: queries, status and operator calls over gRPC, queries of other routers over HTTP."""
