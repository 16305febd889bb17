"""Weight decay as an exponential learning rate: the paper explr."""
