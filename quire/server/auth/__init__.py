"""API keys, authentication middleware, CSRF checks, redaction."""
