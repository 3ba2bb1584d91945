"""The depth axis: the stream contract and one file per method."""
