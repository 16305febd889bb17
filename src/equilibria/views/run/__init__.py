"""A run as people see it: page, notebook card, terminal."""
