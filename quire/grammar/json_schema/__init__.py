"""JSON Schema documents, rewritten into the keywords that llguidance compiles exactly."""
