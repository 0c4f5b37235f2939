"""Releases of onnxruntime whose kernels give wrong answers on some hardware, and what to do about it.

What is known is known_wrong.json, beside this file: part of the code, never of a bundle. A variant lists the kinds of
integer products in its model ("Conv u8s8") as `products`; bundles of before have no such list, and the self-test alone
stands for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Collection, Tuple

from edgeq_device.tables import own_table
from edgeq_device.version import parse_version


@dataclass(frozen=True)
class WrongKernels:
    """One thing that is wrong in a range of releases.

    Attributes:
        provider: whose kernels they are.
        since, before: the first release that has it and the first that has not any more; "" leaves that side open.
        architecture: of the CPU.
        features: CPU features, all of which a CPU must have for it; `without`: those of which it must have none.
        products: kinds of products that are wrong.
        what: what is wrong, a clause; fix: the way out, a sentence without a full stop.
        state: whether it was executed, and on what, or is reported only.
        source: the thread.
        weight_limit: weights of at most this magnitude are right; 0 where smaller weights do not help.
    """

    provider: str
    since: str
    before: str
    architecture: str
    features: Tuple[str, ...]
    without: Tuple[str, ...]
    products: Tuple[str, ...]
    what: str
    fix: str
    state: str
    source: str
    weight_limit: int = 0

    def on(self, architecture: str, features: Collection[str]) -> bool:
        """Whether it concerns such a CPU."""
        return (
            self.architecture == architecture
            and all(feature in features for feature in self.features)
            and not any(feature in features for feature in self.without)
        )

    def in_release(self, version: str) -> bool:
        """Whether a release such as "1.24.1" has it."""
        release = parse_version(version)
        return parse_version(self.since) <= release and not (self.before and release >= parse_version(self.before))

    def explain(self, version: str, products: Collection[str] = ()) -> str:
        """One line: what is wrong, where it is known from, and the way out."""
        named = ", ".join(p for p in self.products if p in products) or ", ".join(self.products)
        return (
            f"onnxruntime {version} computes {named} wrongly on this hardware ({self.what}; {self.source}): {self.fix}"
        )


@lru_cache(maxsize=1)
def known_wrong() -> Tuple[WrongKernels, ...]:
    """What travels with this code."""
    lists = ("features", "without", "products")
    return tuple(
        WrongKernels(**{**row, **{key: tuple(row[key]) for key in lists}}) for row in own_table("known_wrong.json")
    )


def wrong_here(
    version: str, architecture: str, features: Collection[str], provider: str = "CPUExecutionProvider"
) -> Tuple[WrongKernels, ...]:
    """What is wrong in one release of onnxruntime on one CPU."""
    rows = [row for row in known_wrong() if row.provider == provider]
    return tuple(row for row in rows if row.in_release(version) and row.on(architecture, features))
