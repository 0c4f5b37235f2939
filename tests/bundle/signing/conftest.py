"""Provide the bundles of tests/bundle here."""

from tests.bundle.conftest import copy, good, good_zip, spec

__all__ = ["copy", "good", "good_zip", "spec"]
