"""Experiments beyond the papers: other optimizers, a transformer, and forecasts."""
