"""Request bodies, responses and event streams of each API."""
