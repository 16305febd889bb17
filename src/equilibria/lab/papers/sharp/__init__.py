"""Sharpness reduction: the paper sharp."""
