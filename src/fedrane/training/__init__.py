"""Training: the loop, what it writes, and how it goes on."""
