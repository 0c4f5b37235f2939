"""Choose the place of each model file in a bundle, so that files that several variants share are stored once.

The model-package format has two ways to share:

- Variants with the same model and the same weights refer to one shared asset that contains both.
- Variants with different models but the same external data files keep their own models. They refer to one shared asset
  of weights through `session.model_external_initializers_file_folder_path`.

Files that only one variant uses stay in its directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeq_device.bundle.assets import hash_directory
from edgeq_device.engines.catalog import engine_of_file

MODEL_FILE = "model.onnx"


@dataclass(frozen=True)
class StoredFile:
    """Describe a file and the sha256 of its bytes."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class ModelFiles:
    """List a model file and its external data files. The data files are keyed by their paths relative to the model."""

    model: StoredFile
    external: Mapping[str, StoredFile]

    @property
    def name(self) -> str:
        """Return the model's file name in a bundle."""
        engine = engine_of_file(self.model.path.name)
        return MODEL_FILE if engine is None else f"model{engine.suffix}"

    @property
    def together(self) -> dict[str, StoredFile]:
        """Return the model and its external data, keyed by their paths in the model's folder of a bundle."""
        return {self.name: self.model, **self.external}


@dataclass(frozen=True)
class VariantPlaces:
    """Describe where the files of one variant are.

    Attributes:
        model_file: the value of `executor_info.ort.model_file`.
        weights: reference to the asset with the external data; "" if the data are next to the model.
        files: files in the variant's directory, by name.
    """

    model_file: str
    weights: str
    files: Mapping[str, StoredFile]


def share_files(variants: Mapping[str, ModelFiles]) -> tuple[dict[str, VariantPlaces], dict[str, StoredFile]]:
    """Decide where to place the files of `variants`.

    Returns:
        The placement of each variant, and the files of the shared assets, keyed by their paths inside the package.
    """
    placements: dict[str, VariantPlaces] = {}
    assets: dict[str, StoredFile] = {}
    for names, weights in _group_variants(variants):
        models: dict[str, list[str]] = {}
        file = variants[names[0]].name
        for name in names:
            models.setdefault(variants[name].model.sha256, []).append(name)
        if len(names) == 1:
            placements[names[0]] = VariantPlaces(file, "", variants[names[0]].together)
        elif len(models) == 1:
            reference = _add_asset(variants[names[0]].together, assets)
            placements.update({name: VariantPlaces(f"{reference}/{file}", "", {}) for name in names})
        else:
            folder = _add_asset(weights, assets)
            for group in models.values():
                model = {MODEL_FILE: variants[group[0]].model}
                if len(group) == 1:
                    placements[group[0]] = VariantPlaces(MODEL_FILE, folder, model)
                else:
                    reference = _add_asset(model, assets)
                    placements.update({name: VariantPlaces(f"{reference}/{MODEL_FILE}", folder, {}) for name in group})
    return {name: placements[name] for name in variants}, assets


def _group_variants(variants: Mapping[str, ModelFiles]) -> Sequence[tuple[list[str], dict[str, StoredFile]]]:
    # A model reads all its external data from one folder, so the asset of a group contains the external data of all its
    # members. A variant joins the first group that has a file in common with it, unless the two also have different
    # files of the same name. A variant without external data joins a group that has the same model.
    groups: list[tuple[list[str], dict[str, StoredFile]]] = []
    for name, files in variants.items():
        for names, union in groups:
            both = files.external.keys() & union.keys()
            same_model = not files.external and not union and files.model.sha256 == variants[names[0]].model.sha256
            if same_model or (both and all(files.external[key].sha256 == union[key].sha256 for key in both)):
                names.append(name)
                union.update(files.external)
                break
        else:
            groups.append(([name], dict(files.external)))
    return groups


def _add_asset(files: Mapping[str, StoredFile], assets: dict[str, StoredFile]) -> str:
    digest = hash_directory({name: file.sha256 for name, file in files.items()})
    assets.update({f"shared_assets/sha256-{digest}/{name}": file for name, file in files.items()})
    return f"sha256:{digest}"
