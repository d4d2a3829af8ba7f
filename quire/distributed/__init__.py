"""Who computes what when several processes share a model, and how they talk."""
