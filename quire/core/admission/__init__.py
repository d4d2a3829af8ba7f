"""Request checks, queue bounds, tenant usage and blocked requests."""
