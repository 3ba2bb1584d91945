"""How a step is computed: `place` says which process this is, `engine` trains a model or replicas of it."""
