"""A plan as people see it: page, notebook card, terminal."""
