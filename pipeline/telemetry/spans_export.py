"""Send spans over HTTP to an OTLP collector, from a thread of the process that made them.

The SDK is imported only when tracing starts. Each process starts its own tracing, after its fork: threads do not
survive a fork, and connections must not be shared. The standard variables of OpenTelemetry (`OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, headers, batches) apply.
"""

import logging
import os
import socket
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from opentelemetry import trace

from pipeline.config import SettingsError
from pipeline.telemetry import spans
from pipeline.telemetry.metrics import is_configured
from pipeline.telemetry.spans import SCOPE, Span

log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0  #: seconds that an ending process waits for its last spans
_HALF = (1 << 64) - 1
_PROBE_SECONDS = 0.5  #: timeout of the connection that tests whether a collector listens
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class _Tracing:
    provider: Any
    pid: int
    endpoint: str


_tracing: _Tracing | None = None


def require_exporter(endpoint: str) -> None:
    """Refuse an endpoint when the exporter is not installed."""
    if endpoint and find_spec("opentelemetry.exporter") is None:
        raise SettingsError(
            [
                "PIPELINE_OTLP_ENDPOINT: the span exporter is not installed; expected the extra `otel` "
                "(pip install 'celery-durable-effects[otel]'), or no endpoint"
            ]
        )


def start(endpoint: str, *, process_wide: bool = True) -> Any:
    """Start to send the spans of this process to a collector. Returns the provider; None when off.

    ``process_wide`` also sends the spans of other libraries. A process that forks must not use it: the process-wide
    provider can be set only once, and its children set it.
    """
    global _tracing
    if not endpoint or _is_disabled():
        return None
    require_exporter(endpoint)
    if _tracing is not None and _tracing.pid == os.getpid():
        return _tracing.provider
    if _tracing is not None:
        _tracing.provider.shutdown()  # a copy of the parent's
    if is_configured(trace.get_tracer_provider()):
        log.info("spans go to the provider that this process configured, not to the endpoint")
        return None
    # Keep the exporter's warnings off the terminal of a command, which sets up no logging.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    provider = _exporting_provider(endpoint)
    _tracing = _Tracing(provider, os.getpid(), endpoint)
    spans.use_provider(provider)
    if process_wide:
        trace.set_tracer_provider(provider)
    return provider


def _is_disabled() -> bool:
    """Return whether the standard variables turn tracing off."""
    disabled, exporter = (os.environ.get(f"OTEL_{name}", "") for name in ("SDK_DISABLED", "TRACES_EXPORTER"))
    return disabled.strip().lower() == "true" or exporter.strip().lower() == "none"


def stop(timeout: float = FLUSH_SECONDS) -> None:
    """Flush the last spans, at most ``timeout`` seconds; skip it if the collector refuses connections."""
    global _tracing
    if _tracing is None or _tracing.pid != os.getpid():
        return
    ended, _tracing = _tracing, None
    over = threading.Event()
    for target in (_flush, _stop_if_unreachable):
        threading.Thread(target=target, args=(ended, over), name="pipeline-flush-spans", daemon=True).start()
    if not over.wait(timeout):
        log.warning("the last spans could not be sent within %g s: does the collector answer?", timeout)


def _flush(ended: _Tracing, over: threading.Event) -> None:
    """Send the remaining spans. The exporter retries for seconds, and cannot be asked to stop."""
    ended.provider.shutdown()
    over.set()


def _stop_if_unreachable(ended: _Tracing, over: threading.Event) -> None:
    """Stop waiting if nothing listens at the endpoint. Behind a proxy this cannot be tested."""
    url = urlsplit(ended.endpoint)
    if url.hostname is None or (url.scheme in getproxies() and not proxy_bypass(url.hostname)):
        return
    try:
        socket.create_connection((url.hostname, url.port or _PORTS.get(url.scheme, 80)), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        log.info("the last spans were not sent, nothing listens at the endpoint: %s", error)
        over.set()


def tracer_provider(processor: Any) -> Any:
    """Create a provider whose spans go to this processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    class FastSpanProvider(TracerProvider):
        def accept(self, span: Span, at: int) -> None:
            """Export a ``spans.Span`` that has ended."""
            ready = ReadableSpan(
                name=span.name,
                context=span.context,
                parent=span.parent,
                resource=resource,
                attributes=span.attributes,
                links=span.links,
                kind=span.kind,
                status=span.status,
                start_time=span.started_at,
                end_time=at,
                instrumentation_scope=scope,
            )
            processor.on_end(ready)

    scope = InstrumentationScope(SCOPE)
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "pipeline"}))
    provider = FastSpanProvider(resource=resource, shutdown_on_exit=False)
    provider.sampler = rotated_id_sampler(provider.sampler)
    provider.add_span_processor(processor)
    return provider


def rotated_id_sampler(inner: Any) -> Any:
    """Wrap a sampler that expects random trace ids.

    The first bits of the lower half are the same in all ids of runs, so the lower half is rotated.
    """
    from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult

    class RotatedIdSampler(Sampler):
        def should_sample(self, parent_context: Any, trace_id: int, *args: Any, **kwargs: Any) -> SamplingResult:
            lower = trace_id & _HALF
            rotated = (trace_id & ~_HALF) | ((lower << 2 | lower >> 62) & _HALF)
            result: SamplingResult = inner.should_sample(parent_context, rotated, *args, **kwargs)
            return result

        def get_description(self) -> str:
            return str(inner.get_description())

    return RotatedIdSampler()


def _exporting_provider(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return tracer_provider(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
