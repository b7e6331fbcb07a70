"""The edge of a Frontend: the schema of requests, and the responses as clients get them."""
