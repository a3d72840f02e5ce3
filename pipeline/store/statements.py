"""SQL statements that name the type of their rows.

``Statement[RunRow]("SELECT ...")`` is the seam between SQL and Python: ``Transaction.all`` and ``first`` return rows of
the type that the statement names, so that mypy checks every use of a column. Nothing is converted at run time. A row
stays SQLAlchemy's own, and the row type (``pipeline.store.rows``) describes it. The tests compare each row that a
statement returns with its type (``tests/support/row_types.py``).
"""

from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from sqlalchemy import TextClause

RowT_co = TypeVar("RowT_co", covariant=True)


class Statement(TextClause, Generic[RowT_co]):
    """A statement that returns rows of one type. Its SQL is ``text``."""

    inherit_cache = True

    if not TYPE_CHECKING:

        def __class_getitem__(cls, row_type: object) -> GenericAlias:
            """Keep the row type; SQLAlchemy's own ``__class_getitem__`` drops it."""
            return GenericAlias(cls, (row_type,))

    def row_type(self) -> Any:
        """Return the type that was named in the brackets."""
        return get_args(self.__orig_class__)[0]  # type: ignore[attr-defined]


class Command(TextClause):
    """A statement that returns no rows. Running it tells how many rows it changed."""

    inherit_cache = True
