"""Certificates: statements about the maths, measured on random instances, each with its error and bound."""
