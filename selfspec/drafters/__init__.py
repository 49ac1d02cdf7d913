"""Drafting strategies, one file each."""

from typing import Annotated, TypeVar

from pydantic import AfterValidator

from selfspec.config import OWN_NAME, DraftConfig, unknown_name
from selfspec.decoder import Approximation
from selfspec.drafters.auto import Auto
from selfspec.drafters.base import Drafter
from selfspec.drafters.cascade import Cascade
from selfspec.drafters.chain import EarlyExit
from selfspec.drafters.engine import Engine
from selfspec.drafters.lookahead import Lookahead
from selfspec.drafters.plain import Plain
from selfspec.drafters.prompt_lookup import PromptLookup
from selfspec.drafters.readers import LayerReader
from selfspec.drafters.skip_sublayers import SkipSublayers
from selfspec.drafters.tree import ExitTree
from selfspec.drafters.two_model import TwoModel
from selfspec.heads import head_class
from selfspec.sampling import LOSSLESS_RULES

_ALL: tuple[type[Drafter], ...] = (
    Auto,
    Cascade,
    EarlyExit,
    ExitTree,
    Lookahead,
    Plain,
    PromptLookup,
    SkipSublayers,
    TwoModel,
)
DRAFTERS: dict[str, type[Drafter]] = {drafter.name: drafter for drafter in _ALL}
_RENAMED = {
    "layer_skip": (
        "'skip_sublayers' drafts with sublayers skipped (Draft & Verify), and 'early_exit' is what "
        "LayerSkip does"
    )
}
_DrafterT = TypeVar("_DrafterT", bound=type[Drafter])


def register_drafter(drafter: _DrafterT) -> _DrafterT:
    """Register a drafter by its `name`: a class decorator.

    A class that is defined again, in a notebook for example, replaces its earlier definition.

    Raises:
        ValueError: another drafter has that name, or the class lacks a part of a drafter.
    """
    _check_complete(drafter)
    known = DRAFTERS.setdefault(drafter.name, drafter)
    if (known.__module__, known.__qualname__) != (drafter.__module__, drafter.__qualname__):
        raise ValueError(
            f"drafter {drafter.name!r} is already registered by {known.__module__}."
            f"{known.__qualname__}; give {drafter.__qualname__} another name"
        )
    DRAFTERS[drafter.name] = drafter
    return drafter


def _check_complete(drafter: object) -> None:
    if not isinstance(drafter, type) or not issubclass(drafter, Drafter):
        name = getattr(drafter, "__qualname__", repr(drafter))
        raise ValueError(f"{name} is not a drafter; make it a subclass of Drafter")
    lacks = sorted({*drafter.__abstractmethods__} | ({"name"} - {*dir(drafter)}))
    if lacks:
        raise ValueError(
            f"{drafter.__qualname__} lacks {', '.join(lacks)}; a drafter has a name, from_config "
            "and propose"
        )


def make_drafter(engine: Engine, config: DraftConfig) -> Drafter:
    """The drafter that a config names; ValueError for what `check_draft` or this model refuses."""
    check_draft(config)
    engine.match_heads()
    chosen = DRAFTERS[config.drafter]
    drafter = chosen.from_config(engine, config)
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"{chosen.__qualname__}.from_config returned {type(drafter).__name__}, expected a "
            "Drafter"
        )
    if config.approximates and config.drafter != Plain.name:
        drafter.approximate(_approximation(drafter, config))
    return drafter


def _approximation(drafter: Drafter, config: DraftConfig) -> Approximation:
    """What the passes of a drafter do otherwise; ValueError for what cannot be done."""
    keys = ("precision", "lm_head_precision", "window")
    model, key = drafter.drafting, next(key for key in keys if getattr(config, key) is not None)
    if model is None:
        raise ValueError(
            f"{key}={getattr(config, key)!r} is for drafts that a model makes, and "
            f"{config.drafter!r} runs none to draft; leave it out, or choose a drafter that does, "
            "such as 'early_exit'"
        )
    reader = getattr(drafter, "reader", None)
    depth = model.depth if reader is None else reader.head.exit_layer
    whole = reader is not None and depth == model.depth
    # A model beside the target has a cache of its own: nothing is verified from its states.
    beside = model in drafter.decoders
    layers = config.approximates_layers(whole or beside) and depth > 0
    if whole and not layers:
        raise ValueError(
            "approximate='head' leaves the layers as they are, and with exit_layer at the depth of "
            "the model all of them draft; leave approximate out, or choose a lower exit_layer"
        )
    if config.window is not None and not layers and not isinstance(reader, LayerReader):
        raise ValueError(
            f"window={config.window} limits the keys of layers that draft, and here drafts come "
            "from none that reads keys one by one; leave it out, or set approximate='all' with an "
            "exit above the embeddings"
        )
    lm_head = config.lm_head_precision or config.precision
    made = Approximation(config.precision, lm_head, config.window, config.sinks, layers)
    model.check_approximation(made)
    return made


def check_draft(config: DraftConfig) -> DraftConfig:
    """The config; ValueError if its drafter is unknown, or would ignore a setting."""
    if config.drafter not in DRAFTERS:
        if config.drafter in _RENAMED:
            raise ValueError(f"drafter {config.drafter!r} was renamed: {_RENAMED[config.drafter]}")
        raise ValueError(unknown_name("drafter", config.drafter, list(DRAFTERS)) + OWN_NAME)
    if config.drafter != Plain.name:
        _check_choices(config)
    return config


def _check_head(config: DraftConfig) -> DraftConfig:
    if config.head is not None:
        head_class(config.head)
    return config


CheckedDraft = Annotated[DraftConfig, AfterValidator(check_draft), AfterValidator(_check_head)]
"""A draft in a config that is read before the model, whose heads are loaded by their kinds."""


def _check_choices(config: DraftConfig) -> None:
    """Raise ValueError for a setting that the drafter would ignore."""
    name, chosen = config.drafter, DRAFTERS[config.drafter]
    if chosen.makes_trees and config.rule not in LOSSLESS_RULES:
        raise ValueError(
            f"rule={config.rule!r} verifies chains, and {name!r} drafts trees; choose "
            "another drafter, or leave the rule out"
        )
    if config.schedule != "fixed" and not chosen.takes_schedule:
        others = ", ".join(other for other in sorted(DRAFTERS) if DRAFTERS[other].takes_schedule)
        raise ValueError(
            f"schedule={config.schedule!r} decides when a chain of drafts ends, and {name!r} does "
            f"not use it; leave it out, or choose a drafter that does ({others})"
        )
    exit_keys = [key for key in ("exit_layer", "head") if getattr(config, key) is not None]
    if exit_keys and not chosen.takes_exit:
        raise ValueError(
            f"{exit_keys[0]}={getattr(config, exit_keys[0])!r} is for drafts from an exit, and "
            f"{name!r} has none; leave it out, or choose a drafter that has one, such as "
            "'early_exit'"
        )
    if config.draft_model is not None and name != TwoModel.name:
        raise ValueError(
            f"draft_model={config.draft_model!r} is for drafter={TwoModel.name!r}, got "
            f"drafter={name!r}; choose {TwoModel.name!r}, or leave draft_model out"
        )


__all__ = [
    "DRAFTERS",
    "Auto",
    "Cascade",
    "CheckedDraft",
    "Drafter",
    "EarlyExit",
    "ExitTree",
    "Lookahead",
    "Plain",
    "PromptLookup",
    "SkipSublayers",
    "TwoModel",
    "check_draft",
    "make_drafter",
    "register_drafter",
]
