"""One training run: model, optimizer, schedule, checkpoints, measurement."""
