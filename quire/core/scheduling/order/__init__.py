"""Waiting-queue orders: first-come-first-served, priority, fair."""
