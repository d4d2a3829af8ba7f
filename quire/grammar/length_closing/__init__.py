"""Length-aware closing: constrained text is complete within its token budget."""
