"""`python -m twoaxis` is the `twoaxis` command."""

from twoaxis.cli import main

main()
