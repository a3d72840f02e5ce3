"""Settings of the example's shop with more databases, for `django_cases.py`."""

import os
import sys
from typing import Any

if os.environ["SHOP_DRIVER"] == "psycopg2":
    sys.modules["psycopg"] = None  # type: ignore[assignment]  # as if it were not installed

from django.db.backends.postgresql.psycopg_any import IsolationLevel
from shop.settings import *  # type: ignore[import-not-found]  # noqa: F403
from shop.settings import DATABASES as _SHOPS

ROOT_URLCONF = "tests.frameworks.django_cases"
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
_SHOP: dict[str, Any] = _SHOPS["default"]
_BINDING = {"server_side_binding": True} if os.environ["SHOP_DRIVER"] == "psycopg" else {}
DATABASES = {
    "default": _SHOP,
    "other": _SHOP | {"NAME": f"{_SHOP['NAME']}_other"},
    "strict": _SHOP | {"OPTIONS": {"isolation_level": IsolationLevel.REPEATABLE_READ}, "TEST": {"MIRROR": "default"}},
    "binding": _SHOP | {"OPTIONS": _BINDING, "TEST": {"MIRROR": "default"}},
    "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
