"""`python -m twinattn`: the command line."""

from twinattn.cli import main

main()
