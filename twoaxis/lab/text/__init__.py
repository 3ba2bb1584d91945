"""Text and token streams: where they come from, how they are packed, what is held out."""
