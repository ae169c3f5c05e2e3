"""Fixtures that more than one file uses."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Whoever runs the tests in the background of a shell has it ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    full = os.environ.get("FOREBAY_FULL") == "1"
    for item in items:
        if "slow" in item.keywords and not full:
            item.add_marker(pytest.mark.skip(reason="takes long: set FOREBAY_FULL=1"))
        if "gpu" in item.keywords:
            torch = pytest.importorskip("torch")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU that torch can use"))
