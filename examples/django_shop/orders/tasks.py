"""A plain task of the shop, as it was before Pipeline."""

from celery import shared_task

from .models import Order


@shared_task
def count_order(number: str) -> None:
    """Mark an order as counted."""
    Order.objects.filter(number=number).update(is_counted=True)
