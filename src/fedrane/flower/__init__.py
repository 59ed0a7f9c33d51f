"""Federated runs over Flower: every method unchanged, in Flower's simulation or on real machines."""
