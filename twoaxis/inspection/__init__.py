"""A look inside a two-axis model: what each site read from which source, and what the stream did with it."""
