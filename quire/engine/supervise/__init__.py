"""Starts, watches and restarts engine processes."""
