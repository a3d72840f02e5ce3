"""Tests of the shop, as a Django project has them: `python manage.py test`."""

from django.test import TestCase

from pipeline.django import register_workflows

from .models import Order


class PayTests(TestCase):
    """A payment is recorded and published."""

    @classmethod
    def setUpTestData(cls) -> None:
        """Register the workflow, as the first worker does in production."""
        register_workflows()

    def test_a_payment_is_published_once(self) -> None:
        """The second request changes nothing."""
        for published in (["order:1"], []):
            with self.captureOnCommitCallbacks() as callbacks:
                answer = self.client.post("/orders/1/paid", {"email": "ada@example.org"})
            assert answer.json()["published"] == published
            assert len(callbacks) == 1 + len(published), "the task, and the wake-up of the workflow"
        assert Order.objects.count() == 1
