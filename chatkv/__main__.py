"""`python -m chatkv` is `chatkv`."""

from chatkv.cli.main import main

main()
