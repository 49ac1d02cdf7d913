"""What the page of `selfspec app` shows: plain decoding and self-speculation, side by side.

The page itself (`selfspec.display.app.page`) needs Gradio; all else here does without.
"""

from selfspec.display.app.side_by_side import Frame, Offer, Pane, SideBySide

__all__ = ["Frame", "Offer", "Pane", "SideBySide"]
