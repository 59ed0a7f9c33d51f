"""The paper's tables and figures: what must be run for them, the runs, their results, tables and plots."""
