"""JSON Schema, taken apart: read (document), judged on one value (evaluate), split into cases
(tableau), put together for the backends (emit). The face is quire.grammar.frontends.json_schema.
"""
