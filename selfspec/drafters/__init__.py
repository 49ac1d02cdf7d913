"""Drafting strategies, one file each, by name."""

from selfspec.acceptance import LOSSLESS_RULES
from selfspec.config import DraftConfig, unknown_name
from selfspec.drafters.auto import Auto
from selfspec.drafters.base import Drafter
from selfspec.drafters.cascade import Cascade
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.layer_skip import SkipLayers
from selfspec.drafters.lookahead import Lookahead
from selfspec.drafters.plain import Plain
from selfspec.drafters.prompt_lookup import PromptLookup
from selfspec.drafters.tree import ExitTree
from selfspec.drafters.two_model import TwoModel
from selfspec.engine import Engine

_ALL: tuple[type[Drafter], ...] = (
    Auto,
    Cascade,
    EarlyExit,
    ExitTree,
    Lookahead,
    Plain,
    PromptLookup,
    SkipLayers,
    TwoModel,
)
DRAFTERS: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in _ALL}


def make_drafter(engine: Engine, config: DraftConfig) -> Drafter:
    """The drafter that a config names; ValueError lists the known ones."""
    if config.drafter not in DRAFTERS:
        raise ValueError(unknown_name("drafter", config.drafter, list(DRAFTERS)))
    if DRAFTERS[config.drafter].makes_trees and config.rule not in LOSSLESS_RULES:
        raise ValueError(
            f"rule={config.rule!r} judges chains, and {config.drafter!r} drafts trees; choose "
            "another drafter, or leave the rule out"
        )
    drafter = DRAFTERS[config.drafter].from_config(engine, config)
    drafter.rule = config.rule
    return drafter


__all__ = [
    "DRAFTERS",
    "Auto",
    "Cascade",
    "Drafter",
    "EarlyExit",
    "ExitTree",
    "Lookahead",
    "Plain",
    "PromptLookup",
    "SkipLayers",
    "TwoModel",
    "make_drafter",
]
