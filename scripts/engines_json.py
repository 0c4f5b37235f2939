"""Write edgeq_device/engines.json, which devices read, from targets/engines/*.toml."""

from __future__ import annotations

from edgeq.engines import device_table, load_engines
from edgeq.resources import shipped

if __name__ == "__main__":
    engines = load_engines(shipped("targets") / "engines")
    (shipped("targets") / "runtime" / "edgeq_device" / "engines.json").write_text(
        device_table(engines), encoding="utf-8"
    )
