"""Pipeline as an app of a Django project: put ``pipeline.django`` into INSTALLED_APPS."""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.django.project import autodiscover
    from pipeline.django.publishing import publish, register_workflows

__all__ = ["autodiscover", "publish", "register_workflows"]

__getattr__ = lazy_names(
    __name__,
    {
        "pipeline.django.project": "autodiscover",
        "pipeline.django.publishing": "publish register_workflows",
    },
)
