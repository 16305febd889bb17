"""The noisy Rayleigh quotient: the paper nrq."""
