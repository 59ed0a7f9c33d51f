"""A run: how it is set up, its rounds, its results, and how it goes on after a stop."""
