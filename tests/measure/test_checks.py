from __future__ import annotations

from edgeq.measure.checks import ArtifactCheck, keep_strongest, summarise


def test_the_check_nearest_to_the_hardware_counts() -> None:
    checks = keep_strongest(
        [
            ArtifactCheck("load", "none"),
            ArtifactCheck("accuracy", "native", "here"),
            ArtifactCheck("load", "emulated", "qemu"),
            ArtifactCheck("accuracy", "modelled", "a model"),
            ArtifactCheck("load", "modelled", "a table"),
            ArtifactCheck("load", "emulated", "another"),
        ]
    )
    assert [(check.name, check.kind, check.where) for check in checks] == [
        ("load", "emulated", "another"),
        ("accuracy", "native", "here"),
    ]


def test_in_one_line() -> None:
    checks = [ArtifactCheck("load", "native"), ArtifactCheck("accuracy", "none"), ArtifactCheck("self-test", "native")]
    assert summarise(checks) == "on the target's kernels: load, self-test; only on other kernels: accuracy"
