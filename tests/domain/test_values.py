"""Values are frozen, and enums are text that the database and JSON can carry as it is."""

import dataclasses
import importlib
import inspect
import json
import pkgutil
from enum import Enum, StrEnum
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import pipeline.domain
from pipeline.domain.codec import Codec, Sealed, Unreadable
from pipeline.domain.reconciliation import Applied, NotFound, NoVerdict, Retry
from pipeline.domain.values import Actor, HandlerSpec, RunLease, WorkflowSpec

MODULES: list[ModuleType] = [
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(pipeline.domain.__path__, "pipeline.domain.")
]
CLASSES: list[type[Any]] = [
    cls
    for module in MODULES
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if cls.__module__ == module.__name__
]
VALUES = [cls for cls in CLASSES if dataclasses.is_dataclass(cls)]
MODELS = [cls for cls in CLASSES if issubclass(cls, BaseModel)]
ENUMS = [cls for cls in CLASSES if issubclass(cls, Enum)]


def blank(cls: type[Any]) -> Any:
    """A value of the class with nothing in its fields: frozen is about the class, not about what is in it."""
    if cls is Actor:  # the one value that looks at what is in it
        return Actor(name="ada")
    return cls(**{field.name: None for field in dataclasses.fields(cls)})


def test_every_class_of_the_domain_is_a_value_a_policy_an_enum_or_an_error() -> None:
    known = {*VALUES, *MODELS, *ENUMS, Codec, Sealed, Unreadable}  # what an author writes, and JSON that is sealed
    assert [cls for cls in CLASSES if cls not in known and not issubclass(cls, Exception)] == []


@pytest.mark.parametrize("cls", VALUES)
def test_a_value_cannot_be_changed_and_has_no_room_for_more(cls: type[Any]) -> None:
    value = blank(cls)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(cls)[0].name, 1)
    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize("cls", VALUES)
def test_equal_values_are_equal_and_hash_alike(cls: type[Any]) -> None:
    assert blank(cls) == blank(cls)
    assert hash(blank(cls)) == hash(blank(cls))


#: A lease is a pair, and a connector returns its verdict with the one thing that it knows: ``Applied(result)``.
POSITIONAL = {RunLease, Applied, NotFound, Retry, NoVerdict}


@pytest.mark.parametrize("cls", [cls for cls in VALUES if cls not in POSITIONAL])
def test_a_value_is_built_by_the_names_of_its_fields(cls: type[Any]) -> None:
    assert all(field.kw_only for field in dataclasses.fields(cls))


@pytest.mark.parametrize("cls", MODELS)
def test_a_model_is_frozen_and_refuses_what_it_does_not_know(cls: type[BaseModel]) -> None:
    assert cls.model_config["frozen"] is True
    assert cls.model_config["extra"] == "forbid"


@pytest.mark.parametrize("cls", ENUMS)
def test_an_enum_is_text_that_reads_itself_back(cls: type[Enum]) -> None:
    assert issubclass(cls, StrEnum)
    for member in cls:
        assert cls(json.loads(json.dumps(member))) is member
        assert f"{member}" == member.value


@pytest.mark.parametrize("cls", [*VALUES, *MODELS, *ENUMS])
def test_every_class_has_a_docstring(cls: type[Any]) -> None:
    assert (cls.__doc__ or "").strip()
    assert not (cls.__doc__ or "").startswith(f"{cls.__name__}(")


def test_two_handlers_do_not_share_a_policy_they_could_change() -> None:
    one, other = HandlerSpec(name="a"), HandlerSpec(name="b")
    assert one.failures == other.failures
    with pytest.raises(ValueError, match="frozen"):
        setattr(one.failures, "max_failures", 1)  # noqa: B010 - mypy refuses the plain form, as it should


def test_a_workflow_runs_one_at_a_time_and_stops_for_everything_by_default() -> None:
    spec = WorkflowSpec(name="billing", topics=(), handlers=())
    assert (spec.concurrency, spec.on_uncertain, spec.on_logic_error) == (1, "pause", "maintenance")
