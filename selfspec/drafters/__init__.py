"""Drafting strategies, one file each, by name."""

from selfspec.config import DraftConfig, unknown_name
from selfspec.drafters.base import Drafter
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.plain import Plain
from selfspec.drafters.tree import ExitTree
from selfspec.engine import Engine

_ALL: tuple[type[Drafter], ...] = (EarlyExit, ExitTree, Plain)
DRAFTERS: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in _ALL}


def make_drafter(engine: Engine, config: DraftConfig) -> Drafter:
    """The drafter that a config names; ValueError lists the known ones."""
    if config.drafter not in DRAFTERS:
        raise ValueError(unknown_name("drafter", config.drafter, list(DRAFTERS)))
    drafter = DRAFTERS[config.drafter].from_config(engine, config)
    drafter.rule = config.rule
    return drafter


__all__ = ["DRAFTERS", "Drafter", "EarlyExit", "ExitTree", "Plain", "make_drafter"]
