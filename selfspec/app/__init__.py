"""What the page of `selfspec app` shows: plain decoding and self-speculation, side by side.

The page itself (`selfspec.app.page`) needs Gradio; all else here does without.
"""

from selfspec.app.frames import Frame, Pane
from selfspec.app.offer import Offer
from selfspec.app.side_by_side import SideBySide

__all__ = ["Frame", "Offer", "Pane", "SideBySide"]
