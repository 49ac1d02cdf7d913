"""Exit heads for other programs: draft models for engines, custom generate for transformers."""

from selfspec.apps.export.custom_generate import export_custom_generate
from selfspec.apps.export.dflash import ExportedDFlash, export_dflash
from selfspec.apps.export.draft_model import (
    FOLDABLE,
    SIDE_CAR,
    Exported,
    check_foldable,
    export_draft,
    fold,
)
from selfspec.apps.export.eagle3 import ExportedEagle3, eagle3_tensors, export_eagle3
from selfspec.apps.export.guides import check_free

__all__ = [
    "FOLDABLE",
    "SIDE_CAR",
    "Exported",
    "ExportedDFlash",
    "ExportedEagle3",
    "check_foldable",
    "check_free",
    "eagle3_tensors",
    "export_custom_generate",
    "export_dflash",
    "export_draft",
    "export_eagle3",
    "fold",
]
