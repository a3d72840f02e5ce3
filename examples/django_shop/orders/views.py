"""The page that takes payments."""

from functools import partial
from typing import Any

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from pipeline.django import publish

from .models import Order
from .tasks import count_order


@csrf_exempt
@require_POST
def pay(request: HttpRequest, number: str) -> Any:
    """Record a payment and publish it: both are committed together, or neither is."""
    email = request.POST["email"]
    with transaction.atomic():
        _, is_new = Order.objects.get_or_create(number=number, defaults={"email": email})
        paid = {"topic": "orders.paid", "message_id": f"order:{number}", "payload": {"order": number, "email": email}}
        receipt = publish("shop", [paid])
        transaction.on_commit(partial(count_order.delay, number))  # a plain task: lost if the broker is away
    return JsonResponse({"is_new": is_new, "published": receipt.new})
