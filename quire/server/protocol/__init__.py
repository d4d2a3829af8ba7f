"""Bodies of requests (pydantic, read once at the edge) and of answers (plain dicts)."""
