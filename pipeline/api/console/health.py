"""Say whether the system is well, for an inbox in which nothing waits."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from pipeline.admin import system
from pipeline.admin.system import Health
from pipeline.api import formats
from pipeline.api.context import Services
from pipeline.domain.errors import quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One part of the system."""

    is_well: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """Since when nothing waits, and whether each part is well."""

    idle_since: datetime | None  #: the last act in the audit; None: there was none
    checks: tuple[HealthCheck, ...]


def health_report(found: Services) -> HealthReport:
    """Return whether workers, beat and the doctor are well."""
    health = system.health(found.db, found.sweep_periods)
    return HealthReport(idle_since=health.last_act_at, checks=tuple(_checks(health)))


def _checks(health: Health) -> Iterator[HealthCheck]:
    gone = f"; {quantity(health.gone_workers, 'worker')} did not end in order" if health.gone_workers else ""
    running = f"{quantity(health.workers, 'worker')} run" + ("s" if health.workers == 1 else "")
    workers = running if health.are_workers_well else "No worker runs"
    yield HealthCheck(is_well=health.are_workers_well, text=f"{workers}{gone}.")
    late = ", ".join(health.late_sweeps)
    beat = "Beat runs every sweep in time." if health.is_beat_well else f"Sweeps are late: {late}. Is beat running?"
    yield HealthCheck(is_well=health.is_beat_well, text=beat)
    yield HealthCheck(is_well=health.is_doctor_well, text=_doctor_text(health))


def _doctor_text(health: Health) -> str:
    if health.doctor_at is None:
        return "The doctor has not checked yet."
    ago = f"{formats.duration(health.at - health.doctor_at)} ago"
    if health.broken:
        return f"The doctor found {quantity(health.broken, 'broken invariant')} {ago}."
    return f"The doctor found every invariant intact {ago}."
