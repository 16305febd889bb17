"""What no paper shows: equilibria of other optimizers and networks."""
