"""What a run leaves to look at: tables and pictures."""
