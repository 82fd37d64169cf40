"""Jobs and helpers of the engine's tests are used here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))
