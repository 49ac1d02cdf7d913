"""What the page of `selfspec app` shows: plain decoding and self-speculation, side by side.

The page itself (`selfspec.display.app.page`) needs Gradio; all else here does without.
"""

from selfspec.display.app.frames import Frame, Pane
from selfspec.display.app.offer import Offer
from selfspec.display.app.side_by_side import SideBySide

__all__ = ["Frame", "Offer", "Pane", "SideBySide"]
