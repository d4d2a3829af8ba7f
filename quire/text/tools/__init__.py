"""Tool-call formats: one file per model family."""
