"""The tables of the shop."""

from django.db import models


class Order(models.Model):
    """An order that was paid."""

    number = models.CharField(max_length=40, unique=True)
    email = models.EmailField()
    is_counted = models.BooleanField(default=False)
