"""The atlas: the map of every method onto the two axes, and a page per method."""
