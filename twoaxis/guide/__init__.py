"""What there is and what to try: the map of methods with a page for each, what is published about them, and advice."""
