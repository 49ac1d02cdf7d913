"""Exit heads where people already work: stock checkpoints for engines, a folder for the hub."""

from selfspec.export.custom import export_custom_generate
from selfspec.export.draft import SIDE_CAR, Exported, export_draft
from selfspec.export.files import check_free
from selfspec.export.folding import FOLDABLE, check_foldable, fold

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
