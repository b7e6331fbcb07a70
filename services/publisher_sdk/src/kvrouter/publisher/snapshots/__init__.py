"""Snapshots: a rank's state in a file, from which a restarted relay resumes."""
