"""`python -m fastattn`: the command line."""

from fastattn.tools.cli import main

main()
