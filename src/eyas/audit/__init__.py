"""Reads another engine's sources and tells which of its models a draft cannot be served with.

Syntax trees only: nothing of the other engine is imported, run or unpacked. What is looked at, and
what counts as a finding, is in docs/contract.md.
"""

from eyas.audit.analysis import ENGINES, audit
from eyas.audit.baseline import apply_baseline
from eyas.audit.command import run_audit
from eyas.audit.errors import AuditError
from eyas.audit.render import explain, render_table
from eyas.audit.report import AuditReport, ClassReport, Finding

__all__ = [
    "ENGINES",
    "AuditError",
    "AuditReport",
    "ClassReport",
    "Finding",
    "apply_baseline",
    "audit",
    "explain",
    "render_table",
    "run_audit",
]
