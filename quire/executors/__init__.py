"""Executors: how a step reaches one or more devices."""
