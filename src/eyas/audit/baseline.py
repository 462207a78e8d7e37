"""Known findings that a run accepts, so that CI fails on new ones only."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.audit.errors import AuditError
from eyas.audit.report import AuditReport, Finding


def apply_baseline(report: AuditReport, file: str | os.PathLike[str]) -> AuditReport:
    """Marks the findings that a baseline lists as accepted.

    Args:
        report: of this run.
        file: the JSON report of an earlier run (all of its findings are accepted), or a JSON list
            of finding ids.

    Returns:
        The report with `accepted` set on known findings, and in `resolved` the entries of the
        baseline that are findings no more.

    Raises:
        AuditError: the file cannot be read, is something else, or belongs to another engine.
    """
    known = _ids(report.engine, file)

    def mark(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        return tuple(replace(f, accepted=f.id in known) for f in findings)

    return replace(
        report,
        classes=tuple(replace(c, findings=mark(c.findings)) for c in report.classes),
        file_findings=mark(report.file_findings),
        resolved=tuple(sorted(known - {f.id for f in report.findings})),
    )


def _ids(engine: str, file: str | os.PathLike[str]) -> set[str]:
    try:
        data: Any = json.loads(Path(file).read_text("utf-8"))
    except OSError as error:
        raise AuditError(f"baseline {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise AuditError(f"baseline {file}: not JSON ({error})") from error
    if isinstance(data, dict):
        if data.get("engine") not in (engine, None):
            raise AuditError(f"baseline {file}: made for {data['engine']}, not for {engine}")
        data = data.get("findings")
    if isinstance(data, list):
        ids = [entry.get("id") if isinstance(entry, dict) else entry for entry in data]
        strings = {i for i in ids if isinstance(i, str)}
        if len(strings) == len(set(map(str, ids))):
            return strings
    raise AuditError(f"baseline {file}: neither an audit's --json report nor a list of finding ids")
