"""Looks, and changes nothing: what every watched weight does, beside what the theory says it should do."""
