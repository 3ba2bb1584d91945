"""Fused forms of the maths every stream shares, each with a readable reference beside it."""
