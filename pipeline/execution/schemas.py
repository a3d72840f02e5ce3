"""Whether a payload fits what its topic declares, by the JSON Schema that is stored with the topic.

Services that publish need none of the workflow's code: the schema is in the database.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

from pipeline.domain.errors import PayloadError


def check(schema: Any, payload: Any, *, what: str, topic: str) -> None:
    """Raise with the first thing that does not fit. What was given is not repeated: it may be private."""
    known = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)  # some connections give text
    problem = best_match(_validator(known).iter_errors(payload))
    if problem is not None:
        rule = f"{problem.validator} {json.dumps(problem.validator_value)[:120]}"
        raise PayloadError(what, f"{problem.json_path} does not fit", f"{rule}, as topic {topic!r} declares")


#: A tuple is stored as an array, so it counts as one.
_ARRAYS = Draft202012Validator.TYPE_CHECKER.redefine("array", lambda _, value: isinstance(value, list | tuple))
_Validator = extend(Draft202012Validator, type_checker=_ARRAYS)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1000)
def _validator(schema: str) -> Any:
    return _Validator(json.loads(schema))


def pattern_problem(schema: Any) -> str | None:
    """The first pattern of a schema by which payloads cannot be checked, and why not."""
    for pattern in _patterns(schema):
        try:
            re.compile(pattern)
        except re.error as error:
            return f"{pattern!r}: {error}"
    return None


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for value in schema.values():
            yield from _patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _patterns(value)
