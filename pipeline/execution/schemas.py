"""Whether a payload fits what its topic declares, by the JSON Schema that is stored with the topic.

Services that publish need none of the workflow's code: the schema is in the database.
"""

import json
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from pipeline.domain.errors import PayloadError


def check(schema: Any, payload: Any, *, what: str, topic: str) -> None:
    """Raise with the first thing that does not fit. What was given is not repeated: it may be private."""
    problem = best_match(_validator(json.dumps(schema, sort_keys=True)).iter_errors(payload))
    if problem is not None:
        rule = f"{problem.validator} {json.dumps(problem.validator_value)[:120]}"
        raise PayloadError(what, f"{problem.json_path} does not fit", f"{rule}, as topic {topic!r} declares")


@lru_cache(maxsize=1000)
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema))
