"""How things are said in logs and errors: in one line, with the place, and without what an item holds."""

from pipeline.consumer_engine.errors import TransactionException, error_message
from pipeline.domain.failures import error_location


def printable_id(transaction_id: str) -> str:
    """An id as it can stand in a log: one with line breaks in it must not look like a line of its own."""
    return transaction_id if transaction_id.isprintable() else repr(transaction_id)


def failure_description(failure: TransactionException) -> str:
    """What failed, of which type, and where: ``KeyError: 'customer' (imports.py:41)``."""
    cause = failure.__cause__
    is_wrapped = (
        type(failure) is TransactionException and cause is not None and error_message(cause) == error_message(failure)
    )
    raised: BaseException = cause if is_wrapped and cause is not None else failure
    kind = type(raised).__qualname__
    words = " ".join(error_message(raised).splitlines())
    told = words if raised is failure or words.startswith(kind) else f"{kind}: {words}"
    return f"{told}{error_location(raised)}"
