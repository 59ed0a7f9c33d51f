"""The machine: files, threads, and packages that may be missing."""
