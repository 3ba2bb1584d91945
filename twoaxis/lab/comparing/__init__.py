"""Many runs as one comparison: plan, budgets, controls, worker processes."""
