"""The connector SDK. The connectors that ship are in ``http``, ``sql``, ``email`` and ``gmail``."""

from pipeline.connectors.sdk import Call, Connector, mutation, read
from pipeline.domain.operations import Grade
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Retry, Verdict

__all__ = [
    "Applied",
    "Call",
    "Connector",
    "ErrorMeaning",
    "ErrorReading",
    "Grade",
    "NotFound",
    "Retry",
    "Verdict",
    "mutation",
    "read",
]
