"""Optimizer hooks -> inner products -> samples, each with its prediction."""
