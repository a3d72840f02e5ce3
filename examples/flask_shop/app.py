"""A shop in Flask: it records payments and publishes them in one transaction.

flask --app examples.flask_shop.app run
"""

import os
from typing import Any

from celery import Celery
from flask import Flask, request
from sqlalchemy import String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, scoped_session, sessionmaker

from pipeline.client import database_url_of
from pipeline.flask import Pipeline


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order that was paid."""

    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(String(40), primary_key=True)
    email: Mapped[str]


engine = create_engine(database_url_of(os.environ.get("SHOP_DATABASE_URL", "postgresql://localhost/shop")))
session = scoped_session(sessionmaker(engine))
pipeline = Pipeline(session=session)


def create_app() -> Flask:
    """Create the app, with a Celery app as Flask's guide has it."""
    app = Flask("shop")
    broker_url = os.environ.get("SHOP_BROKER_URL", "redis://localhost:6379/0")
    app.extensions["celery"] = Celery("shop", broker=broker_url)
    pipeline.init_app(app)
    Base.metadata.create_all(engine)
    app.add_url_rule("/orders/<number>/paid", view_func=pay, methods=["POST"])
    app.teardown_appcontext(lambda _: session.remove())
    return app


def pay(number: str) -> dict[str, Any]:
    """Record a payment and publish it: both are committed together, or neither is."""
    email = request.form["email"]
    with session.begin():
        is_new = session.get(Order, number) is None
        if is_new:
            session.add(Order(number=number, email=email))
        paid = {"topic": "orders.paid", "message_id": f"order:{number}", "payload": {"order": number, "email": email}}
        receipt = pipeline.publish("receipts", [paid])
    return {"is_new": is_new, "published": receipt.new}
