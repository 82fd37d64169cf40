"""Runs ``train_driver`` on devices that measure briefly before their first step."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("process", "engine")]

import train_driver
from forked_ranks import measure_briefly

if __name__ == "__main__":
    measure_briefly()
    train_driver.main()
