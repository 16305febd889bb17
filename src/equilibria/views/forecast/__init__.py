"""A forecast as people see it: page, notebook card, terminal."""
