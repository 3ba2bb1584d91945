"""Speed and memory, measured in interleaved rounds; every figure is a ratio within one run."""
