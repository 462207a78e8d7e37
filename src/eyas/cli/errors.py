"""From exceptions to exit codes: a mistake gets one line that says what to write, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from eyas.config import ConfigError
from eyas.types import CheckError, EyasError, Severity

EXIT_USAGE, EXIT_FINDINGS = 1, 2

# Every usage error of the parser derives from it. Its module depends on typer's version, which
# brings the parser or borrows click's; the public BadParameter is a child of it in both.
UsageError: Any = typer.BadParameter.__bases__[0]


class EyasGroup(TyperGroup):
    """The commands, with the exit codes of this package (typer's own usage errors exit with 2)."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; a command returns its exit code, None meaning 0."""
        passed = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*passed, **extra)
        try:
            code = super().main(*passed, **extra)
        except UsageError as error:
            code = _report_usage(error)
        except CheckError as error:
            code = _report_findings(error)
        except (EyasError, ConfigError) as error:
            code = report_error(str(error))
        except typer.Abort:
            code = report_error("interrupted")
        sys.exit(code or 0)


def report_error(message: str, hint: str = "") -> int:
    """Print an error to stderr; returns the exit code for usage errors."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    if hint:
        console.print(Text(hint), soft_wrap=True)
    return EXIT_USAGE


def _report_usage(error: Any) -> int:
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help text
        print(message, file=sys.stderr)
        return EXIT_USAGE
    message = message.replace("Value error, ", "")  # pydantic's, which checks types for typer
    near = getattr(error, "possibilities", None)
    if near:  # nearest first
        message = f"no option {error.option_name}; did you mean {near[0]}?"
    command = error.ctx.command_path if error.ctx is not None else "eyas"
    return report_error(message, f"`{command} --help` lists what it takes.")


def _report_findings(error: CheckError) -> int:
    console = Console(stderr=True, highlight=False)
    found = [finding for finding in error.findings if finding.severity is Severity.ERROR]
    plural = "" if len(found) == 1 else "s"
    console.print(Text(f"the check found {len(found)} error{plural}:", "bold red"))
    for finding in found:
        console.print(Text(f"  [{finding.subject}] {finding.code}: {finding.message}"))
        if finding.hint:
            console.print(Text(f"    → {finding.hint}"))
    return EXIT_FINDINGS
