"""Runs in folders, carried out anywhere: workers claim folders, a coordinator knows what it reads from files."""
