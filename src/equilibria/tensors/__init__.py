"""Parameters as the rest of the library sees them: names, rows, shards, roles, inner products, invariance labels."""
