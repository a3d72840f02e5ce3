"""Say whether the system is well, for an inbox in which nothing waits."""

from dataclasses import dataclass
from datetime import datetime

from pipeline.admin.audit import AuditFilter
from pipeline.admin.pages import audit_page
from pipeline.api.context import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One part of the system."""

    is_well: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """Since when nothing waits, and whether each part is well."""

    idle_since: datetime | None  #: the last act of an operator; None: there was none
    checks: tuple[HealthCheck, ...]


def health_report(found: Services) -> HealthReport:
    """Return whether workers, beat and the doctor are well."""
    acts = audit_page(found.db, AuditFilter(), limit=1).items
    return HealthReport(idle_since=acts[0].at if acts else None, checks=())
