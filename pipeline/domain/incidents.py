"""Say which unknown outcomes are alike, and name them: an incident. Pure: no I/O.

They are of one operation, with one class of error, each at most ``INCIDENT_GAP`` after the one before. A stream of them
is one incident per ``INCIDENT_SPAN`` since its first. The database groups them by this rule.
"""

import hashlib
import re
from datetime import datetime, timedelta

#: Two questions that are further apart belong to two incidents.
INCIDENT_GAP = timedelta(minutes=10)
#: A longer stream of alike questions is several incidents.
INCIDENT_SPAN = timedelta(hours=1)
MIN_INCIDENT_SIZE = 2
#: An incident is named by what is alike and by the second of its oldest question.
_ID = re.compile(r"inc-(?P<kind>[0-9a-f]{8})-(?P<second>[0-9a-f]{1,10})")


def incident_id(operation: str, error_class: str, first_at: datetime) -> str:
    """Return the name of an incident: of what is alike, and of the second of its oldest question."""
    kind = hashlib.sha256(f"{operation}\n{error_class}".encode()).hexdigest()[:8]
    return f"inc-{kind}-{int(first_at.timestamp()):x}"


def is_same_incident(id_: str, earlier_id: str) -> bool:
    """Return whether an incident had an earlier name, also if its oldest questions were resolved since.

    One that began at most ``INCIDENT_GAP`` later is the same one: a question so close would have joined it.
    """
    now, before = _ID.fullmatch(id_), _ID.fullmatch(earlier_id)
    if now is None or before is None or now["kind"] != before["kind"]:
        return False
    return 0 <= int(now["second"], 16) - int(before["second"], 16) <= INCIDENT_GAP.total_seconds()
