"""Grammar backends: compilers and matchers."""
