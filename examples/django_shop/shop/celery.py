"""The Celery app of the shop: its own tasks, and Pipeline.

celery -A shop worker -B
"""

import os

from celery import Celery

from pipeline.celery import install
from pipeline.django import autodiscover

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
install(app, workflows=autodiscover)  # the modules `workflows` of the installed apps
