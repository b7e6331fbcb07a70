"""Engines found as pods of Kubernetes. ``discovery`` needs the extra ``kubernetes``; the rest is plain."""
