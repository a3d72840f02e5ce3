"""Workflows without work, as many as a variable names."""

import os

from pipeline.bench.workflow import IDLE, measured_workflow
from pipeline.bench.workflow import world as world  # the connector of all

COUNT_VARIABLE = "BENCH_IDLE_WORKFLOWS"

globals().update(
    {f"{IDLE}{n}": measured_workflow(f"{IDLE}{n}") for n in range(int(os.environ.get(COUNT_VARIABLE, "1")))}
)
