"""A Frontend: routes each request, runs it on a worker, and streams its output."""
