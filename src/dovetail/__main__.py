"""`python -m dovetail` is the command `dovetail`."""

from dovetail.cli import main

main()
