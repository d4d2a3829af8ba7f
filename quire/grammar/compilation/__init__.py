"""Grammar compilation beside the engine: service, cache, worker processes."""
