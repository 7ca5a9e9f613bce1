"""Puts the folder of the launch scripts, which is no package, on the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))
