"""KV block pool, block tables, prefix cache and eviction."""
