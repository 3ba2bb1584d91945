"""What a comparison says: statistics, tables, plots, page."""
