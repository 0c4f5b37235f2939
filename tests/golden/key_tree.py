"""Return the keys of a JSON value as a tree, without those that depend on data, time or the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KEYED_BY_DATA = """
variants bundles targets machines models components files tools calibration.json
scenarios ratios metrics seconds ranges assumed opsets versions runtimes outputs tolerance
session_options engine_options config precisions activations weights shapes
notes remedy_cost dynamic_weight_types method_options search
"""
KEYED_BY_DATA = frozenset(_KEYED_BY_DATA.split())
"""Names of mappings whose keys are data: of a model, a bundle, a profile. Their keys become `*`,
if there is more below them."""

OF_THE_MACHINE = frozenset({"caches", "gpus", "qemu", "clock_mhz", "temperature_c", "float_nodes"})
"""Names of values that a machine may not have: what is below them is left out."""

Tree = dict[str, "Tree"]


def key_tree(value: Any, name: str = "") -> Tree:
    """Return the keys below `value`. All items of a list share one set of keys."""
    tree: Tree = {}
    if name in OF_THE_MACHINE:
        return tree
    if isinstance(value, Mapping):
        for key, item in value.items():
            _merge(tree, {"*" if name in KEYED_BY_DATA else key: key_tree(item, key)})
        if tree == {"*": {}}:
            return {}
    elif isinstance(value, list):
        for item in value:
            _merge(tree, key_tree(item))
    return tree


def _merge(tree: Tree, more: Tree) -> None:
    for key, below in more.items():
        _merge(tree.setdefault(key, {}), below)


def lines(tree: Tree, indent: str = "") -> Iterator[str]:
    """Yield one line for each key, sorted, and indented by its depth."""
    for key in sorted(tree):
        yield indent + key
        yield from lines(tree[key], indent + "  ")


def text(value: Any) -> str:
    """Return the tree of `value` as text."""
    return "\n".join(lines(key_tree(value))) or "no keys"
