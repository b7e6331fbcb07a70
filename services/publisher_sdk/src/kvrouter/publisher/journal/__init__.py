"""A rank's state in a file, and how a relay that was restarted resumes from it."""
