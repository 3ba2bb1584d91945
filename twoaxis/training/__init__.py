"""One training run: its configuration, model, optimizer, loop, checkpoints and result."""
