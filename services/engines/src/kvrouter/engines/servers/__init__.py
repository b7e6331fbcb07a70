"""What the sidecar knows of engines: how each describes itself, takes requests and reports its load."""
