"""Async client of the engine: streams, beam search, transports."""
