"""`python -m eyas`: the command line."""

from eyas.cli import app

app(prog_name="eyas")
