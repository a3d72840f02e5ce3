"""The project. Its Celery app is loaded with Django, as Celery's guide says."""

from .celery import app as celery_app

__all__ = ["celery_app"]
