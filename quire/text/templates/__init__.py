"""Chat templates: rendering in a sandbox."""
