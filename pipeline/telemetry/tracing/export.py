"""Where spans go: over HTTP to an OTLP collector, from a thread that belongs to the process that made them.

Nothing of the SDK is imported before tracing begins. It begins in each process of its own, never before a
fork: a thread does not survive one, and a connection must not be shared. The standard variables of
OpenTelemetry (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, headers, batches) hold.
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
from pipeline.telemetry.tracing import spans
from pipeline.telemetry.tracing.fast_spans import SCOPE, Span

log = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0  #: seconds that a process which ends gives its last spans to get out
_HALF = (1 << 64) - 1
_PROBE_SECONDS = 0.5  #: seconds to see whether a collector is there at all
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class _Tracing:
    provider: Any
    pid: int
    endpoint: str


_tracing: _Tracing | None = None


def require_exporter(endpoint: str) -> None:
    """Refuse an endpoint when what sends to it is not installed."""
    if endpoint and find_spec("opentelemetry.exporter") is None:
        raise SettingsError(
            [
                "PIPELINE_OTLP_ENDPOINT: what sends spans there is not installed; expected the extra `otel` "
                "(pip install 'pipeline[otel]'), or no endpoint"
            ]
        )


def start(endpoint: str, *, process_wide: bool = True) -> Any:
    """Send the spans of this process to a collector, from now on. Returns the provider; None when off.

    ``process_wide`` lets everybody's spans go there, not only ours. A process that forks keeps that to itself:
    what is process-wide can be set once, and its children want to do that.
    """
    global _tracing
    if not endpoint or _is_disabled():
        return None
    require_exporter(endpoint)
    if _tracing is not None and _tracing.pid == os.getpid():
        return _tracing.provider
    if _tracing is not None:
        _tracing.provider.shutdown()  # the parent's, of which a fork has made a copy: nothing of it is ours
    if spans.is_configured(trace.get_tracer_provider()):
        log.info("spans go where somebody else in this process sends them, not to the endpoint")
        return None
    # Where nobody set logging up, as in a command, the exporter's warnings are not for whoever typed it.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    provider = _exporting_provider(endpoint)
    _tracing = _Tracing(provider, os.getpid(), endpoint)
    spans.use_provider(provider)
    if process_wide:
        trace.set_tracer_provider(provider)
    return provider


def _is_disabled() -> bool:
    """Whether the standard variables say that no span is to be sent, as people do whose collector drowns."""
    disabled, exporter = (os.environ.get(f"OTEL_{name}", "") for name in ("SDK_DISABLED", "TRACES_EXPORTER"))
    return disabled.strip().lower() == "true" or exporter.strip().lower() == "none"


def stop(timeout: float = FLUSH_SECONDS) -> None:
    """Let the last spans out. A collector that does not answer is waited for only so long; one that is away, never."""
    global _tracing
    if _tracing is None or _tracing.pid != os.getpid():
        return
    ended, _tracing = _tracing, None
    over = threading.Event()
    for look in (_flush, _stop_if_unreachable):
        threading.Thread(target=look, args=(ended, over), name="pipeline-flush-spans", daemon=True).start()
    if not over.wait(timeout):
        log.warning("the last spans could not be sent within %g s: does the collector answer?", timeout)


def _flush(ended: _Tracing, over: threading.Event) -> None:
    """Send what there is. The exporter tries again, seconds apart, and cannot be told that this is the end."""
    ended.provider.shutdown()
    over.set()


def _stop_if_unreachable(ended: _Tracing, over: threading.Event) -> None:
    """Whether anybody listens at the endpoint. Behind a proxy nobody can tell."""
    url = urlsplit(ended.endpoint)
    if url.hostname is None or (url.scheme in getproxies() and not proxy_bypass(url.hostname)):
        return
    try:
        socket.create_connection((url.hostname, url.port or _PORTS.get(url.scheme, 80)), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        log.info("the last spans were not sent, nobody listens at the endpoint: %s", error)
        over.set()


def tracer_provider(processor: Any) -> Any:
    """A provider as ours is, for spans that go to this processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    class Provider(TracerProvider):
        def accept(self, span: Span, at: int) -> None:
            """Take a span of ours that has ended."""
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
    provider = Provider(resource=resource, shutdown_on_exit=False)
    provider.sampler = rotated_id_sampler(provider.sampler)
    provider.add_span_processor(processor)
    return provider


def rotated_id_sampler(usual: Any) -> Any:
    """A sampler that asks this one about a trace id as evenly spread as it expects.

    The ids of runs are not: the first bits of their lower half are the same in all of them.
    """
    from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult

    class Fair(Sampler):
        def should_sample(self, parent_context: Any, trace_id: int, *args: Any, **kwargs: Any) -> SamplingResult:
            lower = trace_id & _HALF
            spread = (trace_id & ~_HALF) | ((lower << 2 | lower >> 62) & _HALF)
            found: SamplingResult = usual.should_sample(parent_context, spread, *args, **kwargs)
            return found

        def get_description(self) -> str:
            return str(usual.get_description())

    return Fair()


def _exporting_provider(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return tracer_provider(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
