"""Read the facts of all writers about one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgeq.describe.facts import ModelFacts, Reader, merge
from edgeq.util.registry import READERS, Registry

REGISTRY: Registry[Reader] = Registry(READERS, lambda entry: isinstance(entry, Reader), "edgeq.describe.facts.Reader")


def read_facts(metadata: Mapping[str, str], model: Path) -> ModelFacts:
    """Return what the model's metadata and the files next to it state.

    Args:
        metadata: the model's metadata_props.
        model: path of the model's file.

    Raises:
        DataError: a file of a writer is damaged.
        UsageError: two sources contradict each other.
    """
    return merge(reader.read(metadata, model) for _, reader in REGISTRY.items())
