"""Write the documentation's page of methods to standard output: `python -m twoaxis.guide > docs/methods.md`."""

import io
import sys

from twoaxis.guide.pages import docs

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # the file is the same on every system
sys.stdout.write(docs())
