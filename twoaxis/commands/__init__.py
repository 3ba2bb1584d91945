"""The commands of `twoaxis`: one typed function each, which imports what it needs when it runs."""
