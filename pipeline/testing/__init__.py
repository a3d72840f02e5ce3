"""The test kit: run workflows inside a test, script connectors, check that a connector conforms."""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.testing.conformance_suite import (
        CASES,
        Case,
        CaseResult,
        ConformanceReport,
        Subject,
        check_case,
        conformance,
    )
    from pipeline.testing.fault_proxy import (
        Fault,
        FaultyProxy,
        ProxiedRequest,
        is_complete_http_request,
        is_complete_lines,
        is_complete_postgres_messages,
    )
    from pipeline.testing.inline import Inline, WorkerCrash, assert_consumed, assert_deliveries, assert_runs
    from pipeline.testing.scripted_connectors import Does, RecordedEffect, Scripted, scripted
    from pipeline.worker.crash_points import CrashPoint
    from pipeline.worker.settings import WorkerPolicy
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "pipeline.testing.conformance_suite": (
                "CASES Case CaseResult ConformanceReport Subject check_case conformance"
            ),
            "pipeline.testing.fault_proxy": (
                "Fault FaultyProxy ProxiedRequest is_complete_http_request is_complete_lines "
                "is_complete_postgres_messages"
            ),
            "pipeline.testing.inline": "Inline WorkerCrash assert_consumed assert_deliveries assert_runs",
            "pipeline.testing.scripted_connectors": "Does RecordedEffect Scripted scripted",
            "pipeline.worker.crash_points": "CrashPoint",
            "pipeline.worker.settings": "WorkerPolicy",
        },
    )

__all__ = [
    "CASES",
    "Case",
    "CaseResult",
    "ConformanceReport",
    "CrashPoint",
    "Does",
    "Fault",
    "FaultyProxy",
    "Inline",
    "ProxiedRequest",
    "RecordedEffect",
    "Scripted",
    "Subject",
    "WorkerCrash",
    "WorkerPolicy",
    "assert_consumed",
    "assert_deliveries",
    "assert_runs",
    "check_case",
    "conformance",
    "is_complete_http_request",
    "is_complete_lines",
    "is_complete_postgres_messages",
    "scripted",
]
