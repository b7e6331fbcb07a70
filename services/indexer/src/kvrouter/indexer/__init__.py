"""The Indexer: builds an index of the resident blocks of each rank from events, and answers overlap queries."""
