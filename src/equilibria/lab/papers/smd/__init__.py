"""Spherical motion dynamics: the papers smd and smd+."""
