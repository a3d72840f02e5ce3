"""Guard acts by the state that the caller saw: ``ETag`` of a mutation, ``If-Match`` of an act on it."""

from typing import Annotated

from fastapi import Depends, Header

from pipeline.api.problems import ProblemError


def etag_of(state: str) -> str:
    """Return the ETag of a state token."""
    return f'"{state}"'


def state_of(
    if_match: Annotated[
        str | None,
        Header(
            description="The ETag of the mutation as it was shown. The act is refused if it has changed since.",
            examples=['"indeterminate.1.0.1f0e2d3c"'],
        ),
    ] = None,
) -> str:
    """Return the state token that the caller acts on. A request without one is refused."""
    if if_match is None:
        raise ProblemError(
            "precondition-required",
            "The header If-Match is missing; expected the ETag of the mutation as it was shown. Nothing was changed.",
        )
    if len(if_match) < 3 or not (if_match.startswith('"') and if_match.endswith('"')) or '"' in if_match[1:-1]:
        raise ProblemError(
            "invalid-request",
            "The header If-Match is no ETag of a mutation; expected one, in double quotes, as GET returned it. "
            "Nothing was changed.",
        )
    return if_match[1:-1]


SeenState = Annotated[str, Depends(state_of)]
