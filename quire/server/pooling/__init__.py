"""Requests that end with a vector, labels or scores."""
