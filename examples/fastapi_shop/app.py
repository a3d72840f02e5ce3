"""A shop in FastAPI: it records payments, publishes them, and shows the console to its operators under /ops.

uvicorn examples.fastapi_shop.app:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from celery import Celery
from fastapi import Depends, FastAPI, Form, Request
from sqlalchemy import String
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pipeline.api import Person, Role, create
from pipeline.client import AsyncClient
from pipeline.fastapi import Publish, lifespan, publisher

DATABASE_URL = os.environ.get("SHOP_DATABASE_URL", "postgresql+asyncpg://localhost/shop")
BROKER_URL = os.environ.get("SHOP_BROKER_URL", "redis://localhost:6379/0")


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order that was paid."""

    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(String(40), primary_key=True)
    email: Mapped[str]


engine = create_async_engine(DATABASE_URL)
sessions = async_sessionmaker(engine)
celery = Celery("shop", broker=BROKER_URL)
client = AsyncClient(engine, celery)


async def get_session() -> AsyncIterator[AsyncSession]:
    """Return the session of a request."""
    async with sessions() as session:
        yield session


@asynccontextmanager
async def shop_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Create the table of the shop around the lifespan of Pipeline."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with lifespan(client)(app):
        yield
    await engine.dispose()


def identify(request: Request) -> Person | None:
    """Name the person by the login of the shop, which is a header here."""
    name = request.headers.get("x-shop-user")
    return Person(name=name, role=Role.OPERATOR) if name else None


app = FastAPI(lifespan=shop_lifespan)
app.mount("/ops", create(identify=identify, celery_app=celery))


@app.post("/orders/{number}/paid")
async def pay(
    number: str,
    email: Annotated[str, Form()],
    session: Annotated[AsyncSession, Depends(get_session)],
    publish: Annotated[Publish, Depends(publisher(client, get_session))],
) -> dict[str, object]:
    """Record a payment and publish it: both are committed together, or neither is."""
    async with session.begin():
        is_new = await session.get(Order, number) is None
        if is_new:
            session.add(Order(number=number, email=email))
        paid = {"topic": "orders.paid", "message_id": f"order:{number}", "payload": {"order": number, "email": email}}
        receipt = await publish("receipts", [paid])
    return {"is_new": is_new, "published": receipt.new}
