"""How many programs a launch should have."""

MIN_GRID_PROGRAMS = 256
"""Programs of equal length that keep a large GPU busy."""
SPLIT_GRID_PROGRAMS = 4 * 132
"""Programs to aim at where sums are split into parts, some of which end early."""
