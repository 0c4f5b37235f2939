"""Where each model file lies in a package, so that what variants have in common is there once.

Two ways, both of the model-package format:
- variants whose model and weights are all the same refer to one shared asset that holds them;
- variants whose models differ but whose external data files coincide keep their models and refer to one shared asset
  of weights through `session.model_external_initializers_file_folder_path`.
What only one variant uses stays in its directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeq_device.contents import directory_hash

MODEL_FILE = "model.onnx"


@dataclass(frozen=True)
class StoredFile:
    """A file with the sha256 of its bytes."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class ModelFiles:
    """An ONNX file and its external data, the latter by their names relative to the model."""

    model: StoredFile
    external: Mapping[str, StoredFile]

    @property
    def together(self) -> dict[str, StoredFile]:
        """The model under its name in a bundle and its external data, by path relative to the model."""
        return {MODEL_FILE: self.model, **self.external}


@dataclass(frozen=True)
class Placement:
    """Where one variant's files go.

    Attributes:
        model_file: the value of `executor_info.ort.model_file`.
        weights: reference to the asset with its external data, "" where they lie beside the model.
        own: files of the variant's directory, by name.
    """

    model_file: str
    weights: str
    own: Mapping[str, StoredFile]


def share(variants: Mapping[str, ModelFiles]) -> tuple[dict[str, Placement], dict[str, StoredFile]]:
    """Place the files of `variants`.

    Returns:
        The placement of each variant, and the files of the shared assets by their path inside the package.
    """
    placements: dict[str, Placement] = {}
    assets: dict[str, StoredFile] = {}
    for names, weights in _groups(variants):
        models: dict[str, list[str]] = {}
        for name in names:
            models.setdefault(variants[name].model.sha256, []).append(name)
        if len(names) == 1:
            placements[names[0]] = Placement(MODEL_FILE, "", variants[names[0]].together)
        elif len(models) == 1:
            reference = _add_asset(variants[names[0]].together, assets)
            placements.update({name: Placement(f"{reference}/{MODEL_FILE}", "", {}) for name in names})
        else:
            folder = _add_asset(weights, assets)
            for same in models.values():
                model = {MODEL_FILE: variants[same[0]].model}
                if len(same) == 1:
                    placements[same[0]] = Placement(MODEL_FILE, folder, model)
                else:
                    reference = _add_asset(model, assets)
                    placements.update({name: Placement(f"{reference}/{MODEL_FILE}", folder, {}) for name in same})
    return {name: placements[name] for name in variants}, assets


def _groups(variants: Mapping[str, ModelFiles]) -> Sequence[tuple[list[str], dict[str, StoredFile]]]:
    # A model takes all its external data from one folder, so a group's asset is the union of its members' files. A
    # variant joins the first group that has a file in common with it and none of the same name that differs; one
    # without external data joins those of the same model.
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
    digest = directory_hash({name: file.sha256 for name, file in files.items()})
    assets.update({f"shared_assets/sha256-{digest}/{name}": file for name, file in files.items()})
    return f"sha256:{digest}"
