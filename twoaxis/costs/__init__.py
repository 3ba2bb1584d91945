"""What a residual stream or a local mixer costs at a scale nobody has run yet: counted, not guessed."""
