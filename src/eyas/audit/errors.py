"""The one exception that an audit raises for a user's mistake."""


class AuditError(Exception):
    """The audit cannot run as asked: a path, engine, class name or baseline to correct."""
