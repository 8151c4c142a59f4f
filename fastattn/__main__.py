"""`python -m fastattn`: the command line."""

from fastattn.cli import main

main()
