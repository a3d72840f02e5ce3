"""The content of the dashboards. `python deploy/grafana/dashboards.py` writes the files that Grafana reads.

Gauges are read from Postgres and are the same from every worker, so they are taken with max(); counters and histograms
belong to one process each and are added up.
"""

import json
import sys
from pathlib import Path

from panels import Line, Panel, Row, dashboard, variable

HERE = Path(__file__).parent / "dashboards"
OURS = 'workflow=~"$workflow"'
EFFECTS = 'connector=~"$connector",operation=~"$operation"'


def rate(metric: str, labels: str, by: str) -> str:
    """Return a rate per second, summed over the processes."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def gauge(metric: str, labels: str, by: str) -> str:
    """Return a gauge that every process exports."""
    return f"max by ({by}) ({metric}{{{labels}}})"


def quantile(share: float, metric: str, labels: str, by: str) -> str:
    """Return a quantile of a histogram."""
    inside = f"sum by (le, {by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {inside})"


def transition(name: str) -> str:
    """Return the labels of one transition of the chosen workflows."""
    return f'transition="{name}",{OURS}'


OVERVIEW = [
    Row(
        "Does an operator have to act?",
        [
            Panel(
                "Waiting for a person",
                "`pipeline attention` lists them with the command for each.",
                [Line("max by (kind) (pipeline_attention)", "{{kind}}")],
                kind="stat",
                red_from=1,
            ),
            Panel(
                "Findings of the doctor",
                "Broken: a promise does not hold. Overdue: a sweep is not running.",
                [Line("sum by (severity) (max by (invariant, severity) (pipeline_findings))", "{{severity}}")],
                kind="stat",
                red_from=1,
            ),
            Panel(
                "Workflows by status",
                "Paused by an operator or blocked by the system: nothing new starts.",
                [Line(f"sum by (status) ({gauge('pipeline_workflows', OURS, 'workflow, status')})", "{{status}}")],
                kind="stat",
            ),
        ],
    ),
    Row(
        "Flow",
        [
            Panel(
                "Runs started, committed, stopped",
                "Started and committed should follow each other.",
                [
                    Line(rate("pipeline_transitions_total", transition(f"run.{verb}"), "transition"), "{{transition}}")
                    for verb in ("started", "committed", "stopped")
                ],
                unit="ops",
            ),
            Panel(
                "Unfinished runs",
                "Which phase and status they are in.",
                [Line(gauge("pipeline_runs", OURS, "workflow, phase, status"), "{{workflow}} {{phase}} {{status}}")],
            ),
            Panel(
                "Stops by status",
                "Why runs stopped: transient heals by itself, logic and internal do not.",
                [
                    Line(
                        rate("pipeline_runs_stopped_total", OURS, "workflow, handler, status"), "{{handler}} {{status}}"
                    )
                ],
                unit="ops",
            ),
        ],
    ),
    Row(
        "Latency",
        [
            Panel(
                "From publish to commit",
                "Age of the oldest input of a run when it committed.",
                [
                    Line(quantile(share, "pipeline_run_latency_seconds", OURS, "workflow"), f"{{{{workflow}}}} p{name}")
                    for share, name in ((0.5, "50"), (0.99, "99"))
                ],
                unit="s",
            ),
            Panel(
                "Phases, 99 of 100",
                "Compare with the time limits of the phases.",
                [Line(quantile(0.99, "pipeline_phase_duration_seconds", OURS, "phase"), "{{phase}}")],
                unit="s",
            ),
            Panel(
                "Runs per message",
                "1 under light load, up to PIPELINE_MAX_COHORT_SIZE under backlog.",
                [
                    Line(
                        "sum by (phase) (rate(pipeline_cohort_size_sum[$__rate_interval])) "
                        "/ sum by (phase) (rate(pipeline_cohort_size_count[$__rate_interval]))",
                        "{{phase}}",
                    )
                ],
            ),
        ],
    ),
    Row(
        "Backlog",
        [
            Panel(
                "Events waiting",
                "Grows while more comes in than is done.",
                [Line(gauge("pipeline_backlog_events", OURS, "workflow, topic, handler"), "{{topic}} {{handler}}")],
            ),
            Panel(
                "Age of the oldest event that may be taken",
                "Whether a backlog is a problem.",
                [
                    Line(
                        gauge("pipeline_backlog_age_seconds", OURS, "workflow, topic, handler"), "{{topic}} {{handler}}"
                    )
                ],
                unit="s",
                red_from=300,
            ),
            Panel(
                "Messages in the broker, entries in streams",
                "A queue that only grows has no worker; a stream that only grows has no ingest.",
                [
                    Line("max by (key) (redis_key_size)", "{{key}}"),
                    Line("max by (stream, group) (redis_stream_group_lag)", "{{stream}} not read by {{group}}"),
                    Line("max by (stream, group) (redis_stream_group_messages_pending)", "{{stream}} pending"),
                ],
            ),
        ],
    ),
    Row(
        "Streams",
        [
            Panel(
                "Entries not delivered yet, and pending ones",
                "As the ingest processes see them; pending ones were read and not acknowledged.",
                [
                    Line("max by (stream, group) (pipeline_queue_lag)", "{{stream}} {{group}} waiting"),
                    Line("max by (stream, group) (pipeline_queue_pending)", "{{stream}} {{group}} pending"),
                ],
            ),
            Panel(
                "Entries read, acknowledged, taken over",
                "Taken over: a process died with them.",
                [
                    Line(
                        f"sum by (stream) (rate(pipeline_queue_{what}_total[$__rate_interval]))",
                        f"{{{{stream}}}} {name}",
                    )
                    for what, name in (("messages_read", "read"), ("acks", "acked"), ("messages_claimed", "taken over"))
                ],
                unit="ops",
            ),
            Panel(
                "Reads that found something, 99 of 100",
                "Redis is slow, or far away.",
                [
                    Line(
                        "histogram_quantile(0.99, sum by (le, stream) "
                        "(rate(pipeline_queue_read_latency_seconds_bucket[$__rate_interval])))",
                        "{{stream}}",
                    )
                ],
                unit="s",
            ),
        ],
    ),
    Row(
        "Recovery",
        [
            Panel(
                "Leases",
                "Lapsed ones belong to processes that died; the rescue takes them within seconds.",
                [Line("max by (state) (pipeline_leases)", "{{state}}")],
            ),
            Panel(
                "Rescues, and deliveries ignored",
                "Both are repairs: now and then is normal, all the time is not.",
                [
                    Line(rate("pipeline_rescues_total", OURS, "workflow"), "rescued {{workflow}}"),
                    Line(
                        "sum by (task) (rate(pipeline_deliveries_ignored_total[$__rate_interval]))", "ignored {{task}}"
                    ),
                ],
                unit="ops",
            ),
            Panel(
                "Since each sweep last ran",
                "Beat dispatches them; without beat the workers do so after three periods.",
                [Line("min by (sweep) (pipeline_sweeps_age_seconds)", "{{sweep}}")],
                unit="s",
            ),
            Panel(
                "How long sweeps take, 99 of 100",
                "Far below their periods, or they are late.",
                [
                    Line(
                        "histogram_quantile(0.99, sum by (le, sweep) "
                        "(rate(pipeline_sweep_duration_seconds_bucket[$__rate_interval])))",
                        "{{sweep}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "Postgres answers",
                "0: no worker gets an answer; nothing is claimed and nothing is sent.",
                [Line("max(pipeline_database_up)", "up")],
                kind="stat",
            ),
            Panel(
                "Workers that answer",
                "Scrape targets that are up.",
                [Line('sum(up{job="pipeline"})', "workers")],
                kind="stat",
            ),
        ],
    ),
]

OUTSIDE = [
    Row(
        "What became of mutations",
        [
            Panel(
                "Applied, failed, doubted, escalated",
                "Doubted: the reconciler asks the outside system. Escalated: an operator must resolve it.",
                [
                    Line(
                        f'sum by (transition) (rate(pipeline_transitions_total{{transition="mutation.{verb}"}}'
                        "[$__rate_interval]))",
                        verb,
                    )
                    for verb in ("applied", "failed", "doubted", "escalated", "found_late")
                ],
                unit="ops",
            ),
            Panel(
                "Share of indeterminate outcomes",
                "Of all mutations that ended, those that became indeterminate. The objective is at most 0.1 %.",
                [Line("pipeline:uncertain:ratio_rate1h", "1 h"), Line("pipeline:uncertain:ratio_rate6h", "6 h")],
                unit="percentunit",
                red_from=0.001,
            ),
            Panel(
                "Budget left this month",
                "1 is untouched, below 0 the objective is missed.",
                [Line("1 - pipeline:uncertain:ratio_rate30d / 0.001", "budget")],
                unit="percentunit",
                kind="stat",
            ),
        ],
    ),
    Row(
        "Calls",
        [
            Panel(
                "Calls by outcome",
                "Of one connector and operation.",
                [
                    Line(
                        rate("pipeline_mutation_duration_seconds_count", EFFECTS, "connector, operation, outcome"),
                        "{{connector}}.{{operation}} {{outcome}}",
                    )
                ],
                unit="ops",
            ),
            Panel(
                "Duration, 99 of 100",
                "Compare with the operation's timeout.",
                [
                    Line(
                        quantile(0.99, "pipeline_mutation_duration_seconds", EFFECTS, "connector, operation"),
                        "{{connector}}.{{operation}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "Open breakers",
                "No new mutation of such an operation starts.",
                [Line(gauge("pipeline_breakers_open", EFFECTS, "connector, operation"), "{{connector}}.{{operation}}")],
                red_from=1,
            ),
        ],
    ),
    Row(
        "Uncertainty",
        [
            Panel(
                "Not resolved",
                "By status; pending ones wait for approval.",
                [
                    Line(
                        gauge("pipeline_mutations_open", EFFECTS, "connector, operation, status"),
                        "{{connector}}.{{operation}} {{status}}",
                    )
                ],
            ),
            Panel(
                "Age of the oldest that is not resolved",
                "An old indeterminate one waits for an operator.",
                [
                    Line(
                        gauge("pipeline_mutations_oldest_seconds", EFFECTS, "connector, operation, status"),
                        "{{connector}}.{{operation}} {{status}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "From doubt to resolution, 95 of 100",
                "How long it takes to resolve a doubt.",
                [
                    Line(
                        quantile(
                            0.95,
                            "pipeline_mutation_time_to_resolution_seconds",
                            EFFECTS,
                            "connector, operation, verdict",
                        ),
                        "{{connector}}.{{operation}} {{verdict}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "Reconcile attempts by verdict",
                "Many retries: the provider does not answer reconcile attempts either.",
                [
                    Line(
                        rate("pipeline_reconcile_attempts_total", EFFECTS, "connector, operation, verdict"),
                        "{{connector}}.{{operation}} {{verdict}}",
                    )
                ],
                unit="ops",
            ),
        ],
    ),
]


def files() -> dict[str, str]:
    """Return the content of every file by its name."""
    workflow = variable("workflow", "pipeline_workflows")
    outside = [variable(name, "pipeline_mutation_duration_seconds_count") for name in ("connector", "operation")]
    pages = [
        dashboard("pipeline-overview", "Pipeline: overview", OVERVIEW, [workflow]),
        dashboard("pipeline-effects", "Pipeline: effects and uncertainty", OUTSIDE, outside),
    ]
    return {f"{page['uid']}.json": json.dumps(page, indent=2) + "\n" for page in pages}


def main(arguments: list[str]) -> int:
    """Write the files, or with --check fail when they are outdated."""
    made = files()
    if arguments == ["--check"]:
        stale = [name for name, text in made.items() if (HERE / name).read_text(encoding="utf-8") != text]
        sys.stderr.write("".join(f"{name} is stale: run python deploy/grafana/dashboards.py\n" for name in stale))
        return 1 if stale else 0
    for name, text in made.items():
        (HERE / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
