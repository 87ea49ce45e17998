"""The names of `quantdrift`: typed, documented, and loaded when they are asked for."""

import inspect
import re
from typing import Any

import pytest

import quantdrift
from quantdrift import aio
from quantdrift.cli.main import main

pytestmark = pytest.mark.unit

FUNCTIONS = ("compare", "diagnose", "gate", "load", "plan", "quantise", "repair")
COMMAND_ALONE = {"as_json", "config_path", "junit", "fleet_path", "measure"}
"""What a command prints, writes or calls otherwise."""
FUNCTION_ALONE = {"old", "new", "progress", "stop", "seed", "alpha"}
"""What a command has other arguments for, shows, or leaves at its default: who repeats an experiment writes a script."""
RENAMED = {"number": "reference"}


@pytest.mark.parametrize("name", quantdrift.__all__)
def test_each_public_name_is_there_and_documented(name: str) -> None:
    """It is loaded when it is asked for."""
    assert inspect.getdoc(getattr(quantdrift, name))


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        quantdrift.absent  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_what_its_command_takes(name: str) -> None:
    """An option that one of them lacks is noticed here; `--from` and `--to` of a comparison are its two arguments."""
    command: Any = main.get_command(None, name)  # type: ignore[arg-type]
    options = {RENAMED.get(param.name, param.name) for param in command.params} - COMMAND_ALONE
    parameters = set(inspect.signature(getattr(quantdrift, name)).parameters)
    assert options - {"begin", "end", "old_from", "old_to"} <= parameters | {"config"}
    assert parameters - {"config"} - FUNCTION_ALONE <= options


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_awaited_function_has_the_same_parameters(name: str) -> None:
    """And the same words."""
    function, awaited = getattr(quantdrift, name), getattr(aio, name)
    assert inspect.signature(awaited) == inspect.signature(function)
    assert inspect.iscoroutinefunction(awaited)
    assert awaited.__doc__ == function.__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_documented_parameter_is_one(name: str) -> None:
    """The docstring names no parameter that is gone."""
    function = getattr(quantdrift, name)
    text = inspect.getdoc(function)
    assert text is not None
    section = text.split("Parameters\n----------\n")[1].split("\nRaises\n")[0]
    named = {
        part for line in re.findall(r"^(\w[\w, ]*)$", section, re.MULTILINE) for part in line.split(", ")
    }
    assert named <= set(inspect.signature(function).parameters)
