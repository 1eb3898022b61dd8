"""`python -m stepladder` is the command `stepladder`, for when it is not on the path."""

from stepladder.cli import main

main()
