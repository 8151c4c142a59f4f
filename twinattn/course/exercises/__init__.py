"""Exercises: write the functions of a serving engine yourself, and see at once whether they are right."""
