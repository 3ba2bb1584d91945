"""The lab: data, training, comparing, statistics, report."""
