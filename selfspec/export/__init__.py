"""Exit heads for other programs: draft models for engines, custom generate for transformers."""

from selfspec.export.custom_generate import export_custom_generate
from selfspec.export.draft_model import (
    FOLDABLE,
    SIDE_CAR,
    Exported,
    check_foldable,
    check_free,
    export_draft,
    fold,
)

__all__ = [
    "FOLDABLE",
    "SIDE_CAR",
    "Exported",
    "check_foldable",
    "check_free",
    "export_custom_generate",
    "export_draft",
    "fold",
]
