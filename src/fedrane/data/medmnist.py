"""The two-dimensional datasets of MedMNIST with one label per image: Yang et al., "MedMNIST v2", Scientific Data 2023.

Each is one ``.npz`` file with the arrays ``train_images``, ``train_labels`` and so on, for train, val and test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data import arrays
from fedrane.errors import DataError
from fedrane.system import memory

SOURCE = "https://zenodo.org/records/10519652/files"
SIDE = 28


class Facts(NamedTuple):
    """What MedMNIST publishes about a dataset, in version 3.0.2."""

    classes: tuple[str, ...]
    channels: int
    train: int
    test: int
    md5: str


_ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right"),
    *("liver", "lung-left", "lung-right", "pancreas", "spleen"),
)
DATASETS: Mapping[str, Facts] = {
    "pathmnist": Facts(
        (
            *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
            *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        ),
        3,
        89_996,
        7_180,
        "a8b06965200029087d5bd730944a56c1",
    ),
    "dermamnist": Facts(
        (
            *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma"),
            *("benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions"),
        ),
        3,
        7_007,
        2_005,
        "0744692d530f8e62ec473284d019b0c7",
    ),
    "octmnist": Facts(
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        1,
        97_477,
        1_000,
        "c68d92d5b585d8d81f7112f81e2d0842",
    ),
    "pneumoniamnist": Facts(("normal", "pneumonia"), 1, 4_708, 624, "28209eda62fecd6e6a2d98b1501bb15f"),
    "retinamnist": Facts(tuple("01234"), 3, 1_080, 400, "bd4c0672f1bba3e3a89f0e4e876791e4"),
    "breastmnist": Facts(("malignant", "normal, benign"), 1, 546, 156, "750601b1f35ba3300ea97c75c52ff8f6"),
    "bloodmnist": Facts(
        (
            *("basophil", "eosinophil", "erythroblast", "immature granulocytes"),
            *("lymphocyte", "monocyte", "neutrophil", "platelet"),
        ),
        3,
        11_959,
        3_421,
        "7053d0359d879ad8a5505303e11de1dc",
    ),
    "tissuemnist": Facts(
        (
            *("Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells"),
            *("Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments"),
            "Thick Ascending Limb",
        ),
        1,
        165_466,
        47_280,
        "ebe78ee8b05294063de985d821c1c34b",
    ),
    "organamnist": Facts(_ORGANS, 1, 34_561, 17_778, "68e3f8846a6bd62f0c9bf841c0d9eacc"),
    "organcmnist": Facts(_ORGANS, 1, 12_975, 8_216, "b9ceb9546e10131b32923c5bbeaea2b1"),
    "organsmnist": Facts(_ORGANS, 1, 13_932, 8_827, "9ab87b696fb54e2a387ebe992d6ed5f1"),
}


def read(path: Path, part: str, facts: Facts, remedy: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images and labels of one part of a file; ``remedy`` is added to error messages."""
    images, labels = f"{part}_images", f"{part}_labels"
    shape = (SIDE, SIDE) if facts.channels == 1 else (SIDE, SIDE, facts.channels)
    try:
        headers = arrays.headers(path)
        if not {images, labels} <= headers.keys():
            raise DataError(f"{path} has {', '.join(headers)}", f"it should have {images} and {labels}", remedy)
        of_x, of_y = headers[images], headers[labels]
        fits = of_x.dtype == np.uint8 and of_x.shape[1:] == shape and of_y.dtype.kind in "iu"
        if not fits or of_y.shape != (of_x.shape[0], 1):
            raise DataError(
                f"{path} has {images} of {of_x.dtype} {of_x.shape} and {labels} of {of_y.dtype} {of_y.shape}",
                f"images are bytes of the shape {shape}, and each has one label",
                remedy,
            )
        memory.require(2 * of_x.size, f"{images} of {path}", "Use a machine with more memory")
        held = arrays.read(path, [images, labels])
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "", remedy) from error
    x, y = held[images], held[labels]
    if len(y) and (y.min() < 0 or y.max() >= len(facts.classes)):
        why = f"the classes are numbered from 0 to {len(facts.classes) - 1}"
        raise DataError(f"{path} has labels from {y.min()} to {y.max()}", why, remedy)
    pixels = x[:, np.newaxis] if facts.channels == 1 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return pixels, y[:, 0].astype(np.int64)
