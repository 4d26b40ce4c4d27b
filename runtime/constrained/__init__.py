"""Which tokens may come next: grammars, schemas and lists of tokens."""
