"""The table of what the adapter relies on has all that its source takes from the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.engine import trtllm
from quartet.engine.trtllm.doctor import SYMBOLS, Form, Symbol
from quartet.engine.trtllm.environment import PROGRAMS
from quartet.engine.trtllm.schema import CONFIGS, DECODING_CLASSES

_PACKAGE = "tensorrt_llm"
_INSPECTING = ("doctor.py",)  # it inspects the package, and uses nothing of it
_FILES = sorted(path for path in Path(trtllm.__path__[0]).rglob("*.py") if path.name not in _INSPECTING)
_MODULES = {symbol.module for symbol in SYMBOLS} | {_PACKAGE}
#: A base, and what is made of a dict within a dict: no module imports them.
_UNNAMED = {"DecodingBaseConfig", "MoeLoadBalancerConfig"}


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in _FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def _imports() -> set[tuple[str, str]]:
    """All of ``from tensorrt_llm... import NAME``, in functions too."""
    return {
        (node.module, alias.name)
        for _, node in _nodes()
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == _PACKAGE
        for alias in node.names
    }


def _symbols(name: str) -> list[Symbol]:
    return [symbol for symbol in SYMBOLS if symbol.name == name]


def test_every_import_of_the_adapter_is_in_the_table() -> None:
    imports = _imports()
    assert ("tensorrt_llm", "LLM") in imports, "the adapter's imports are not found"
    assert imports - {(symbol.module, symbol.name) for symbol in SYMBOLS} == set()


def test_modules_that_it_names_otherwise_stand_there_too() -> None:
    """As in ``import tensorrt_llm.x`` or ``import_module("tensorrt_llm.x")``."""
    named = {
        alias.name
        for _, node in _nodes()
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == _PACKAGE
    }
    named |= {
        node.value
        for _, node in _nodes()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(f"{_PACKAGE}.")
        and node.value.replace(".", "").isidentifier()
    }
    assert "tensorrt_llm.lora_helper" in named, "modules that are named in text are not found"
    # To look into a program would be to run it.
    assert named - _MODULES == {*PROGRAMS}


def test_every_configuration_that_engine_args_may_have_stands_there() -> None:
    named = {symbol.name for symbol in SYMBOLS}
    assert (set(CONFIGS) | set(DECODING_CLASSES.values())) - named == _UNNAMED


@pytest.mark.parametrize("name", sorted({symbol.name for symbol in SYMBOLS if symbol.form is Form.FIELDS}))
def test_keywords_that_the_adapter_passes_to_a_class_stand_with_it(name: str) -> None:
    passed = {
        keyword.arg
        for _, node in _nodes()
        if isinstance(node, ast.Call) and _called(node) == name
        for keyword in node.keywords
        if keyword.arg is not None
    }
    if name == "SamplingParams":
        assert "max_tokens" in passed, "calls of the package's classes are not found"
    known = {field for symbol in _symbols(name) for need in symbol.needs for field in need.expected}
    assert passed - known == set()


def test_arguments_of_a_request_stand_with_generate_async() -> None:
    """The adapter gathers them by name in `calls`."""
    [call] = _symbols("LLM.generate_async")
    known = {name for need in call.needs for name in need.expected}
    given = {
        node.slice.value
        for path, node in _nodes()
        if path.name == "calls.py"
        and isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "arguments"
        and isinstance(node.slice, ast.Constant)
    }
    assert "lora_request" in given, "the arguments are not found"
    assert given - known == set()


@pytest.mark.parametrize(("variable", "name"), [("result", "RequestOutput"), ("output", "CompletionOutput")])
def test_every_attribute_read_of_a_result_is_listed_with_its_class(variable: str, name: str) -> None:
    read = {
        node.attr
        for path, node in _nodes()
        if path.name in ("requests.py", "token_cursor.py")
        and isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == variable
    }
    assert read & {"outputs", "token_ids"}, "what is read is not found"
    known = {attribute for symbol in _symbols(name) for need in symbol.needs for attribute in need.expected}
    assert read - known == set()


def _called(node: ast.Call) -> str | None:
    """``X`` of ``package.X(...)``, or of ``X(...)``."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None
