"""`eyas audit`, without its option parsing."""

import os
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from eyas.audit.analysis import audit
from eyas.audit.baseline import apply_baseline
from eyas.audit.errors import AuditError
from eyas.audit.render import explain, find_class, render_table
from eyas.audit.report import AuditReport

EXIT_CLEAN = 0
EXIT_USAGE = 1
EXIT_FINDINGS = 2


def run_audit(
    path: str | os.PathLike[str],
    *,
    engine: str,
    class_name: str | None = None,
    as_json: bool = False,
    baseline: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    error_console: Console | None = None,
) -> int:
    """Audits, prints, and returns the exit code.

    Args:
        path: the other engine's source tree, wheel or sdist.
        engine: "sglang" or "vllm".
        class_name: prints all about this class instead of the table of all.
        as_json: prints the report as JSON, which a later run takes as its baseline.
        baseline: known findings; only others count.
        console: of the output (default: stdout).
        error_console: of the error text (default: stderr).

    Returns:
        0 without findings, 2 with findings that no baseline accepts, 1 where the audit cannot run.
    """
    console = console or Console()
    try:
        report = audit(path, engine)
        if baseline is not None:
            report = apply_baseline(report, baseline)
        if class_name is not None:
            found = tuple(find_class(report, class_name))
            report = replace(report, classes=found, file_findings=(), resolved=())
    except AuditError as error:
        (error_console or Console(stderr=True)).print(Text(f"error: {error}", "red"))
        return EXIT_USAGE
    _print(report, class_name, console, as_json=as_json)
    return EXIT_FINDINGS if report.open_findings else EXIT_CLEAN


def _print(report: AuditReport, class_name: str | None, console: Console, *, as_json: bool) -> None:
    if as_json:
        console.file.write(report.to_json() + "\n")  # unstyled and never folded
    elif class_name is not None:
        console.print(Text(explain(report, class_name)), soft_wrap=True)
    else:
        render_table(report, console)
