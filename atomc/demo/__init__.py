"""The demo model that comes with atomc: a folder as Hugging Face lays it out, small enough to
ship.
"""

from pathlib import Path

PATH = Path(__file__).parent
