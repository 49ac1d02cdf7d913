"""The web page of `selfspec app`: plain decoding and self-speculation side by side.

Only `selfspec.apps.display.app.page` needs Gradio.
"""

from selfspec.apps.display.app.side_by_side import DraftMenu, SideBySide

__all__ = ["DraftMenu", "SideBySide"]
