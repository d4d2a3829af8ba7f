"""Structured output: grammars from callers, compiled to token masks."""
