"""The project's own files agree with each other."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import ROOT

import selfspec


def pins(file):
    """Every `name==version; marker` in a file, quotes and comments aside."""
    return set(re.findall(r'"([a-z-]+==[^"]+)"', (ROOT / file).read_text()))


def test_pre_commit_has_the_pins_of_the_dev_extra():
    assert pins("pyproject.toml") == pins(".pre-commit-config.yaml") != set()


def test_installed_version_is_the_package_version():
    assert version("selfspec") == selfspec.__version__


@pytest.mark.parametrize("file", ["py.typed", "__init__.py"])
def test_package_says_that_it_is_typed(file):
    assert (Path(selfspec.__file__).parent / file).is_file()
