"""The environment of programs that a test starts."""

import os

#: Which server programs are embedded: `make test-servers` chooses them.
CHOSEN_SERVERS = ("PIPELINE_POSTGRES_BIN", "PIPELINE_REDIS_BIN")


def clean_environ() -> dict[str, str]:
    """Our environment without settings of ours, except the choice of the server programs."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_") or name in CHOSEN_SERVERS
    }
