"""Devices: memory, capability, thread count."""
