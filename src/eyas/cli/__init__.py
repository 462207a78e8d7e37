"""The command line. Heavy imports (torch, transformers) happen inside the commands that need them.

Exit codes: 0, 1 for a mistake in what was asked, 2 for findings (of `check`, `audit`, or a
benchmark whose outputs differ).
"""

from eyas.cli.main import app

__all__ = ["app"]
