"""Every transition in the table is announced somewhere, and nothing else is."""

import ast
import logging
import re
from collections.abc import Iterator, Sequence

import pytest

from pipeline.telemetry.transition_log import TRANSITIONS
from tests.support.source_code import Function, functions, label, modules

#: What a log record is made of already, and what people hand in: neither may be a field of a line.
RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime", "transition"}
#: This function is given the name and some fields; its callers are checked.
LOG_MUTATION = "log_mutation"
SECRET = {"payload", "params", "result", "data", "state", "ui", "error", "evidence"}


def logged_calls(source: str) -> Iterator[tuple[ast.Call, list[str]]]:
    """Every call of ``log_on_commit`` or ``log_mutation`` with the names it may log."""
    module = ast.parse(source)
    for function in functions(module):
        if function.name == LOG_MUTATION:
            continue
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(attr="log_on_commit"), args=[name, *_]):
                    yield node, names(name, function, module)
                case ast.Call(func=ast.Name(id="log_mutation"), args=[_, name, *_]):
                    yield node, names(name, function, module)


def names(node: ast.expr, function: Function, module: ast.Module) -> list[str]:
    """The texts an expression can be: itself, either branch, or what the name or table it uses was given."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=body, orelse=orelse):
            return [*names(body, function, module), *names(orelse, function, module)]
        case ast.Dict(values=values):
            return [text for value in values for text in names(value, function, module)]
        case ast.Subscript(value=value):
            return names(value, function, module)
        case ast.Name(id=name):
            given = [*assigned(name, list(ast.walk(function))), *assigned(name, module.body)]
            return [text for value in given for text in names(value, function, module)]
    return []


def assigned(name: str, where: Sequence[ast.AST]) -> list[ast.expr]:
    found = [node for node in where if isinstance(node, ast.Assign)]
    return [node.value for node in found if any(isinstance(t, ast.Name) and t.id == name for t in node.targets)]


LoggedTransition = tuple[str, ast.Call, list[str]]


@pytest.fixture(scope="module")
def logged_transitions() -> list[LoggedTransition]:
    """Every logged transition of the package: its location, the call, and the names it may log."""
    return [
        (f"{label(path)}:{call.lineno}", call, said)
        for path in modules("pipeline")
        if re.search("log_on_commit|log_mutation", source := path.read_text())
        for call, said in logged_calls(source)
    ]


def test_every_announced_name_is_in_the_table(logged_transitions: list[LoggedTransition]) -> None:
    assert logged_transitions
    unknown = [(place, ast.unparse(call)) for place, call, said in logged_transitions if not said]
    assert unknown == [], "cannot tell which names these say; use a literal, a table or an either-or"
    assert [(place, said) for place, _, said in logged_transitions if not set(said) <= set(TRANSITIONS)] == []


def test_a_log_line_has_plain_fields_and_never_payloads(logged_transitions: list[LoggedTransition]) -> None:
    assert {place: found for place, call, _ in logged_transitions if (found := bad_fields(call))} == {}


def bad_fields(call: ast.Call) -> list[str]:
    """The fields of a line that it may not have; fields are spelled out, so that they can be checked here."""
    fields = {keyword.arg or "**": keyword.value for keyword in call.keywords}
    secret = [name for name in SECRET & set(fields) if not is_member(fields[name])]
    return sorted([*secret, *({*RESERVED, "**"} & set(fields))])


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("tx.log_on_commit('a', run=1, error=Kind.LOGIC)", []),
        ("tx.log_on_commit('a', **fields)", ["**"]),
        ("tx.log_on_commit('a', message='x', payload=y)", ["message", "payload"]),
    ],
)
def test_a_bad_field_is_found(line: str, bad: list[str]) -> None:
    ((call, _),) = logged_calls(f"def f():\n    {line}\n")
    assert bad_fields(call) == bad


def is_member(node: ast.expr) -> bool:
    """Whether it is a member of an enum: a name of our own, whatever the field is called."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id[0].isupper()


def test_every_transition_in_the_table_is_announced_somewhere(logged_transitions: list[LoggedTransition]) -> None:
    assert set(TRANSITIONS) - {text for _, _, said in logged_transitions for text in said} == set()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("tx.log_on_commit('a.b', x=1)", ["a.b"]),
        ("tx.log_on_commit('a' if x else 'b')", ["a", "b"]),
        ("log_mutation(tx, 'a.b', row, x=1)", ["a.b"]),
        ("name = 'a' if x else 'b'\n    tx.log_on_commit(name)", ["a", "b"]),
        ("tx.log_on_commit(TABLE[verb])", ["c", "d"]),
        ("tx.log_on_commit(f'run.{verb}')", []),
        ("tx.log_on_commit(given_from_outside)", []),
    ],
)
def test_names_are_found_behind_either_or_and_tables(body: str, said: list[str]) -> None:
    ((_, found),) = logged_calls(f"TABLE = {{'x': 'c', 'y': 'd'}}\ndef f():\n    {body}\n")
    assert found == said
