"""Text and diagnostic tasks as training examples that are a function of (seed, index)."""
