"""One package per paper, one module per figure or theorem."""
