"""Check, time and run this bundle on this device: python edgeq_run.py info|verify|bench|infer.

Needs Python 3.9 or newer, numpy and onnxruntime. The same file is the bundle's `__main__.py`, so that
`python some.edgeq verify` works on the zip as it is.
"""

import os
import sys
from pathlib import Path

# A compiled file beside the sources would be one that the manifest does not know, and the next check would refuse it.
sys.dont_write_bytecode = True
# `python BUNDLE/ verify` has compiled this very file (as __main__.py) before it could say so.
if __spec__ is not None and __spec__.cached is not None and Path(__spec__.cached).is_file():
    Path(__spec__.cached).unlink()
    if not any(Path(__spec__.cached).parent.iterdir()):
        Path(__spec__.cached).parent.rmdir()

# onnxruntime's wheels report their use to their maker, and leave a file in the temporary folder, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from edgeq_device.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(root=Path(__file__).parent))
