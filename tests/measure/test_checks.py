from __future__ import annotations

from edgeq.measure.coverage import Check, strongest, summarise


def test_what_is_nearest_to_the_hardware_counts() -> None:
    found = strongest(
        [
            Check("load", "none"),
            Check("accuracy", "native", "here"),
            Check("load", "emulated", "qemu"),
            Check("accuracy", "modelled", "a model"),
            Check("load", "modelled", "a table"),
            Check("load", "emulated", "another"),
        ]
    )
    assert [(check.name, check.kind, check.where) for check in found] == [
        ("load", "emulated", "another"),
        ("accuracy", "native", "here"),
    ]


def test_in_one_line() -> None:
    checks = [Check("load", "native"), Check("accuracy", "none"), Check("self-test", "native")]
    assert summarise(checks) == "native: load, self-test; not on its kernels: accuracy"
