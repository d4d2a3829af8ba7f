"""Front ends: JSON Schema, regex, EBNF, Lark and structural tags to the grammar AST."""
