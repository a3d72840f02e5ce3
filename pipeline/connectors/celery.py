"""Existing Celery tasks as mutations: run inside the mutate phase, or sent to the workers that run them today.

A task is taken as it is. An error of its body says nothing about its effect, because a task may do several things
before it fails: unless it is declared otherwise, the outcome is then unknown.

This module imports nothing of Celery: it uses the tasks that it is given.
"""

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel

from pipeline.connectors.sdk import Call, Connector, Operation, mutation
from pipeline.domain.errors import HandlerError, InvalidInputError, LogicError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Retry, Verdict

__all__ = ["Tasks"]

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  #: seconds between two reads of a result
_EXPECTED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


class Tasks(Connector):
    """A connector whose mutations are Celery tasks.

    ``ctx.tasks.charge_card(order="4711")`` requests the task ``charge_card`` that was added.
    """

    def __new__(cls, *_: Any, **__: Any) -> "Tasks":
        """Make an object of a class of its own: operations belong to the class of a connector."""
        return super().__new__(type(cls.__name__, (cls,), {"__module__": cls.__module__}))

    def __init__(self, name: str = "tasks") -> None:
        self.name = name

    def add(
        self,
        task: T,
        *,
        remote: bool = False,
        refused: tuple[type[BaseException], ...] = (),
        errors: Callable[[BaseException], ErrorReading | None] | None = None,
        reconcile: Callable[..., Verdict] | None = None,
        **options: Any,
    ) -> T:
        """Add a task as a mutation, and return the task unchanged.

        - By default the body of the task runs here, with the idempotency key as ``self.request.id``.
        - With ``remote`` its message is sent with the key as the id of the task. A worker that reads its queue runs it.
          The result backend says how it ended. Celery may run a message twice, which neither side can see.
        - ``refused`` are exceptions which say that nothing happened. ``errors`` reads others.
        - ``reconcile`` is called with the call and the parameters.
        - ``options`` are those of ``mutation``. Declare ``keyed=True`` only if the task has one effect per key.
        """
        celery_task: Any = task
        _require_task(celery_task)
        carry_out = _sent if remote else _run_here
        if remote and celery_task.ignore_result:
            raise InvalidInputError(
                f"The task {celery_task.name!r} ignores its result, so its outcome cannot be read; expected "
                "ignore_result=False, or remote=False."
            )
        if remote and reconcile is None:
            reconcile = _result_reader(celery_task, lambda error: operation.reading(error))

        def function(connector: Any, call: Call, /, **params: Any) -> Any:
            del connector
            if not call.remaining:
                raise TransientError("the deadline had passed before the task began")
            return carry_out(celery_task, call, params)

        _take_signature(function, celery_task)
        operation: Operation[Any] = mutation(errors=_reader(refused, errors), **options)(function)
        operation.name = function.__name__
        if reconcile is not None:
            operation.set_reconcile_function(_as_method(reconcile))
        kind: Any = type(self)
        if hasattr(kind, operation.name):
            taken = "a task" if operation.name in vars(kind) else "an attribute"
            raise InvalidInputError(f"{self.name} has {taken} {operation.name!r} already; expected a name of its own.")
        setattr(kind, operation.name, operation)
        kind._operations = None  # collected before
        return task

    def durable(self, workflow: Any, **options: Any) -> Callable[[T], T]:
        """Make a task a durable effect of a workflow: one event of the topic with its name is one run of the task.

        The payload of the event holds the arguments. The task itself is returned unchanged.
        """
        if not hasattr(workflow, "effect"):
            problem = f"@tasks.durable was given {workflow!r}; expected a workflow: @tasks.durable(workflow)."
            raise InvalidInputError(problem)

        def declare(task: T) -> T:
            self.add(task, **options)
            name = _name_of(task)
            topic = workflow.topic(name, schema=type(self).operations()[name].model)

            def request(ctx: Any, event: Any) -> Any:
                return getattr(getattr(ctx, self.name), name)(**event.raw_payload)

            request.__module__, request.__qualname__ = _function_of(task).__module__, name
            workflow.effect(topic, name=name)(request)
            return task

        return declare


def _run_here(task: Any, call: Call, params: dict[str, Any]) -> Any:
    """Run the body of a task in this thread. ``self.retry()`` raises its error instead of sending a message."""
    task.push_request(id=call.idempotency_key, kwargs=params, called_directly=True)
    try:
        # a base class may put the body into a context, as Flask's recipe does; a lazy task has its class only by name
        is_plain = getattr(task.__class__.__call__, "__module__", "").startswith("celery.")
        return task.run(**params) if is_plain else _with_key(task, call.idempotency_key)(**params)
    finally:
        task.pop_request()


def _with_key(task: Any, key: str) -> Any:
    """Return a copy whose requests all have the key: Celery's own ``__call__`` makes one more, without an id."""
    kind = task.__class__
    copy = object.__new__(kind)
    copy.__dict__.update(vars(task._get_current_object() if hasattr(task, "_get_current_object") else task))
    copy.push_request = partial(task.push_request, id=key, called_directly=True)
    return copy


def _sent(task: Any, call: Call, params: dict[str, Any]) -> Any:
    """Send the message of a task, and wait for its result until the deadline."""
    if problem := _backend_problem(task):
        raise LogicError(f"the app of {task.name!r} has {problem}, so the outcome could not be read")
    models = {name: value.model_dump(mode="json") for name, value in params.items() if isinstance(value, BaseModel)}
    with task.app.producer_or_acquire() as producer:
        _connect(producer, call)
        task.apply_async(
            kwargs=params | models, task_id=call.idempotency_key, producer=producer, retry=False, ignore_result=False
        )
    pause, over = _FIRST_PAUSE, threading.Event()
    while True:
        found = task.app.AsyncResult(call.idempotency_key)
        if found.state == "SUCCESS":
            return found.result
        if found.state == "FAILURE":
            raise _error_of(found)
        left = call.remaining.total_seconds()
        if not left:
            raise TimeoutError(f"the task {task.name!r} has not ended in time; its result is read later")
        over.wait(min(pause, left))
        pause = min(pause * 2, _LONGEST_PAUSE)


def _connect(producer: Any, call: Call) -> None:
    """Connect to the broker. If it cannot be reached, nothing was sent."""
    try:
        producer.connection.ensure_connection(max_retries=1, interval_start=0, timeout=call.remaining.total_seconds())
    except Exception as error:
        raise TransientError(f"the broker cannot be reached ({type(error).__name__}); nothing was sent") from error


def _result_reader(task: Any, reading: Callable[[BaseException], ErrorReading]) -> Callable[..., Verdict]:
    """Return a reconcile by the result backend. What it does not know may still be in a queue, or run."""

    def reconcile(call: Call, /, **_: Any) -> Verdict:
        problem = _backend_problem(task)
        found = None if problem else task.app.AsyncResult(call.idempotency_key)
        state = found.state if found is not None else f"unknown: the app has {problem}"
        if found is not None and state == "SUCCESS":
            return Applied(found.result)
        if found is not None and state == "FAILURE":
            error = _error_of(found)
            if reading(error).meaning is not ErrorMeaning.UNKNOWN:
                return NotFound(f"the task failed with {type(error).__name__}")
            return Retry(f"the task failed with {type(error).__name__}, which does not say whether it happened")
        return Retry(f"the state of the task is {state}")

    return reconcile


def _backend_problem(task: Any) -> str:
    """Describe why another process could not read the result of a task; empty if it can."""
    kind = type(task.app.backend).__name__
    problems = {"DisabledBackend": "no result backend", "RPCBackend": "a result backend that only the sender can read"}
    return problems.get(kind, "")


def _error_of(found: Any) -> BaseException:
    error = found.result
    return error if isinstance(error, BaseException) else RuntimeError(str(error))


def _reader(
    refused: tuple[type[BaseException], ...], errors: Callable[[BaseException], ErrorReading | None] | None
) -> Callable[[BaseException], ErrorReading | None]:
    """Return the reading of errors: as declared, else unknown. Our own errors say what they mean."""

    def read(error: BaseException) -> ErrorReading | None:
        if isinstance(error, refused):
            return ErrorReading(meaning=ErrorMeaning.REFUSED)
        own = errors(error) if errors else None
        if own is None and not isinstance(error, HandlerError):
            return ErrorReading(meaning=ErrorMeaning.UNKNOWN)
        return own

    return read


def _as_method(reconcile: Callable[..., Verdict]) -> Callable[..., Verdict]:
    def method(connector: Any, call: Call, /, **params: Any) -> Verdict:
        del connector
        return reconcile(call, **params)

    return method


def _require_task(task: Any) -> None:
    """Refuse what is no task, and a task whose body Celery would never run."""
    if not (hasattr(task, "run") and hasattr(task, "push_request")):
        raise InvalidInputError(f"{task!r} is no Celery task; expected this decorator above that of Celery.")
    if inspect.iscoroutinefunction(_function_of(task)):
        raise InvalidInputError(
            f"The task {task.name!r} is an `async def`, which Celery does not run; expected a `def`."
        )


def _function_of(task: Any) -> Any:
    """Return the function that was decorated."""
    return inspect.unwrap(getattr(task.run, "__func__", task.run))


def _name_of(task: Any) -> str:
    """Return the name of the function, or of a task that is a class."""
    name: str = _function_of(task).__name__
    return task.name.rpartition(".")[2] if name == "run" else name


def _take_signature(function: Any, task: Any) -> None:
    """Give a function the name and the parameters of a task, behind the connector and the call."""
    body, positional = _function_of(task), inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = inspect.signature(task.run).parameters.values()
    wrong = [parameter.name for parameter in taken if parameter.kind not in _EXPECTED]
    if wrong:
        raise InvalidInputError(
            f"The task {task.name!r} takes {wrong[0]!r} by position only; expected arguments that have names."
        )
    first = [inspect.Parameter(name, positional) for name in ("_connector", "_call")]
    kept = [
        each if each.kind is each.VAR_KEYWORD else each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in taken
    ]
    function.__signature__ = inspect.Signature([*first, *kept])
    function.__name__, function.__qualname__, function.__module__ = _name_of(task), task.name, body.__module__
    try:
        function.__annotations__ = inspect.get_annotations(body, eval_str=True)
    except NameError as error:
        raise InvalidInputError(
            f"The annotations of the task {task.name!r} cannot be read ({error}); expected names that the module has "
            "when it runs."
        ) from error
