"""Hook into the command ``celery``, which loads this module before it looks for the app.

`celery -A pipeline` looks into the current folder first, so none of our code runs if that has another `pipeline`.
The app there may be meant: Celery goes on with it.
"""

import sys

import click

from celery_durable_effects import current_path, describe_other


@click.command("pipeline-name", hidden=True)
def check_name() -> None:
    """Say whether `pipeline` is ours here."""
    click.echo(describe_other(current_path()) or "`pipeline` is the package of celery-durable-effects.")


if sys.argv[0].endswith(("/celery", "/celery/__main__.py")) and (found := describe_other(current_path())):
    click.echo(found, err=True)
