"""Laws that every method keeps; hold your own method to them too."""
