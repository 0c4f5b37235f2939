"""Write the data files that devices read, next to edgeq_device's code. engines.json is made from
targets/engines/*.toml, and known_wrong.json from targets/onnxruntime/known_wrong.toml.
"""

from __future__ import annotations

from edgeq.model.compatibility import wrong_table
from edgeq.run.engines import build_device_table, load_engines
from edgeq.util.folders import shipped

if __name__ == "__main__":
    folder = shipped("targets") / "runtime" / "edgeq_device" / "engines"
    (folder / "engines.json").write_text(
        build_device_table(load_engines(shipped("targets") / "engines")), encoding="utf-8"
    )
    (folder / "known_wrong.json").write_text(wrong_table(), encoding="utf-8")
