"""The sequence axis: the mixer contract and one file per local mixer."""
