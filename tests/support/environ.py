"""The environment of programs that a test starts."""

import os

#: Which server programs are embedded: `make test-servers` chooses them.
CHOSEN_SERVERS = ("PIPELINE_POSTGRES_BIN", "PIPELINE_REDIS_BIN")
#: For a pytest that a test starts: without plugins that it does not need. They are a third of its start.
FEWER_PLUGINS = {"PYTEST_ADDOPTS": "-p no:celery -p no:docker_tools -p no:schemathesis"}


def clean_environ() -> dict[str, str]:
    """Our environment without settings of ours, except the choice of the server programs."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_") or name in CHOSEN_SERVERS
    }
