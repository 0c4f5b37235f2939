from __future__ import annotations

from edgeq.measure.coverage import ArtifactCheck, strongest, summarise


def test_the_check_nearest_to_the_hardware_counts() -> None:
    found = strongest(
        [
            ArtifactCheck("load", "none"),
            ArtifactCheck("accuracy", "native", "here"),
            ArtifactCheck("load", "emulated", "qemu"),
            ArtifactCheck("accuracy", "modelled", "a model"),
            ArtifactCheck("load", "modelled", "a table"),
            ArtifactCheck("load", "emulated", "another"),
        ]
    )
    assert [(check.name, check.kind, check.where) for check in found] == [
        ("load", "emulated", "another"),
        ("accuracy", "native", "here"),
    ]


def test_in_one_line() -> None:
    checks = [ArtifactCheck("load", "native"), ArtifactCheck("accuracy", "none"), ArtifactCheck("self-test", "native")]
    assert summarise(checks) == "native: load, self-test; not on its kernels: accuracy"
