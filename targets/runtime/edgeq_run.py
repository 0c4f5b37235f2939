"""Check, time and run this bundle on this device: python edgeq_run.py info|verify|bench|infer.

Needs Python 3.9 or newer, numpy and onnxruntime. The same file is the bundle's `__main__.py`, so that
`python some.edgeq verify` works on the zip as it is.
"""

import sys
from pathlib import Path

# A compiled file beside the sources would be one that the manifest does not know, and the next check would refuse it.
sys.dont_write_bytecode = True

from edgeq_device.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(root=Path(__file__).parent))
