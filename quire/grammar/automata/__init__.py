"""Regular expressions and finite automata."""
