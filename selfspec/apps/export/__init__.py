"""Exit heads for other programs: draft models for engines, custom generate for transformers."""

from selfspec.apps.export.custom_generate import export_custom_generate
from selfspec.apps.export.dflash import ExportedDFlash, export_dflash
from selfspec.apps.export.draft_model import Exported, export_draft, fold
from selfspec.apps.export.eagle3 import ExportedEagle3, export_eagle3

__all__ = [
    "Exported",
    "ExportedDFlash",
    "ExportedEagle3",
    "export_custom_generate",
    "export_dflash",
    "export_draft",
    "export_eagle3",
    "fold",
]
