"""The gateway: routes each request, runs it on its worker, and streams its tokens."""
