"""Settings: where they come from, which have an effect, and the user's code that they name."""
