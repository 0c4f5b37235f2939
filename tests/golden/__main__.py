"""Record the interface again with `python -m tests.golden`; `git diff tests/golden/recorded` shows the changes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.golden.recorded_files import FOLDER, RECORD

shutil.rmtree(FOLDER, ignore_errors=True)
os.environ[RECORD] = "1"
sys.exit(pytest.main(["-q", str(Path(__file__).parent.parent / "test_golden.py"), *sys.argv[1:]]))
