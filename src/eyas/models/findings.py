"""A list that collects findings, so that everything wrong is reported together (D5)."""

from __future__ import annotations

from eyas.types import CheckError, Finding, Severity


class Findings(list[Finding]):
    """Findings in the order they were made."""

    def error(self, subject: str, code: str, message: str, hint: str = "") -> None:
        """Add a finding that stops `serve`."""
        self.append(Finding(Severity.ERROR, code, subject, message, hint))

    def warn(self, subject: str, code: str, message: str, hint: str = "") -> None:
        """Add a finding that is worth reading and stops nothing."""
        self.append(Finding(Severity.WARNING, code, subject, message, hint))

    def skip(self, subject: str, code: str, message: str, hint: str = "") -> None:
        """Add what could not be checked."""
        self.append(Finding(Severity.SKIPPED, code, subject, message, hint))

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop `serve`."""
        return [finding for finding in self if finding.severity is Severity.ERROR]

    def raise_on_errors(self) -> None:
        """Raise CheckError with all findings if one of them is an error."""
        if self.errors:
            raise CheckError(self)


def report_quantized(subject: str, method: str, findings: Findings) -> None:
    """The one finding about weights that are stored in a quantized format."""
    findings.error(
        subject,
        "quantized-weights",
        f"the {subject}'s weights are quantized ({method}), which is not supported yet; its "
        "tensors were not compared with the model's",
        "use the bfloat16 version of the checkpoint",
    )
