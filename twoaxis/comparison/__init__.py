"""Many runs as one comparison: its plan, budgets, workers, statistics and report; `probe` compares retrofits."""
