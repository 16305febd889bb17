"""Optimizer hooks -> inner products -> samples, with a prediction beside each."""
