"""The public names, their documentation, and the size of the package's files."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cplm_jax

FILES = sorted(Path(cplm_jax.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("name", cplm_jax.__all__)
def test_public_names_import_with_a_docstring(name):
    thing = getattr(cplm_jax, name)
    assert inspect.getdoc(thing)
    assert not inspect.getdoc(thing).startswith(f"{name}(")  # what dataclasses make up


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = cplm_jax.no_such_name


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(p.parts[-2:]))
def test_every_public_definition_has_a_docstring(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), path
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
            owner_is_function = any(
                isinstance(outer, ast.FunctionDef) and node is not outer and node in ast.walk(outer)
                for outer in ast.walk(tree)
            )
            assert owner_is_function or overload or ast.get_docstring(node), (
                f"{path}:{node.lineno} {node.name}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(p.parts[-2:]))
def test_no_file_holds_too_much(path):
    assert len(path.read_text().splitlines()) <= 400


def test_a_configuration_mistake_is_told_without_loading_jax():
    program = (
        "import sys; from cplm_jax.cli import run, train_command\n"
        "assert run(train_command, ['--no.such', '1']) == 2\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
