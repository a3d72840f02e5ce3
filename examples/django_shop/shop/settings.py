"""Settings of the shop. Nothing of Pipeline's but the installed app: its database is the one of DATABASES."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

_database = urlsplit(os.environ.get("SHOP_DATABASE_URL", "postgresql://localhost/shop"))

SECRET_KEY = "only for this example"  # noqa: S105
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
INSTALLED_APPS = ["orders", "pipeline.django"]
ROOT_URLCONF = "orders.urls"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _database.path[1:],
        "USER": unquote(_database.username or ""),
        "PASSWORD": unquote(_database.password or ""),
        "HOST": _database.hostname,
        "PORT": _database.port,
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
EMAIL_FILE_PATH = Path(os.environ.get("SHOP_MAILS", "mails"))
CELERY_BROKER_URL = os.environ.get("SHOP_BROKER_URL", "redis://localhost:6379/0")
CELERY_TASK_IGNORE_RESULT = True
