"""Grammars of answers with tool calls and reasoning."""
