"""The mark that ties a test to a numbered rule of docs/design/rules.md."""

import pytest


def rule(*ids: str) -> pytest.MarkDecorator:
    """This test proves the rules with these ids."""
    return pytest.mark.rule(*ids)
