"""Metrics, traces, logs and the dashboard stream."""
