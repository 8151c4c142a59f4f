"""`python -m refattn` says what else can be run."""

import sys

PROGRAMS = """\
refattn is a library: the attention of LLM serving, to read. What can be run:

  python -m refattn.exercises      write the functions yourself; each is checked at once
  python -m refattn.drawing        draw a batch, a mask, a cascade, as text or as a picture
  python -m refattn.conformance    check an attention kernel, anybody's
  python -m fastattn               the fast twin: a demo, a server, a benchmark
"""

if __name__ == "__main__":
    sys.stdout.write(PROGRAMS)
