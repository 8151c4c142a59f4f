"""What the notebooks and the site use: exercises and puzzles with their checks, and drawings."""
