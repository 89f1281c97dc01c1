"""``batchformer features IMAGES``: features of a user's images with any timm network, for generalized zero-shot."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from batchformer.data.images import open_image, passed_over
from batchformer.data.loading.order import generator
from batchformer.data.sets.feature_files import attributes_of, read_attributes
from batchformer.data.sets.files import list_images, read_lines, visible_folders
from batchformer.errors import UserError, did_you_mean
from batchformer.files import refuse_to_replace, refuse_unwritable, write_atomically

HELP = """
batchformer features IMAGES --attributes FILE --unseen N [options]

Write the features of images in IMAGES/<class>/ to an npz file that the recipe features-gzsl trains on.

  --attributes FILE   numbers that describe each class: CSV (a header, then class,number,number,...), or .mat or npz
                      with att and the names of the classes
  --unseen N          number of classes that are never seen in training, drawn by --seed; or a text file of their names
  --test-part P       fraction of the images of every other class that is held out for testing (default: 0.2)
  --backbone NAME     any timm network, with its pretrained weights (default: resnet101)
  --weights FILE      load its weights from a file instead of downloading timm's
  --batch-size N      images at a time (default: 64)
  --seed N            seed of the split (default: 0)
  --out FILE          file to write (default: IMAGES/features.npz)
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"features: {message}; batchformer features --help lists the options.")


def run(args: list[str]) -> int:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("images", type=Path)
    parser.add_argument("--attributes", type=Path, required=True)
    parser.add_argument("--unseen", required=True)
    parser.add_argument("--test-part", type=float, default=0.2)
    parser.add_argument("--backbone", default="resnet101")
    parser.add_argument("--weights")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    out = given.out or given.images / "features.npz"
    if given.batch_size < 1 or not 0 < given.test_part < 1:
        raise UserError("features: --batch-size is 1 or more, --test-part above 0 and below 1.")
    if not given.images.is_dir():
        raise UserError(f"{given.images} is not a folder: images are expected in IMAGES/<class>/.")
    classes = visible_folders(given.images)
    attributes = attributes_of(classes, *read_attributes(given.attributes), given.attributes)
    listing = list_images(str(given.images), "", classes)
    unseen = choose_unseen(given.unseen, classes, given.seed)
    refuse_unwritable(out)
    refuse_to_replace(out, lambda content: content.startswith(b"PK") and b"features.npy" in content[:64])

    network, transform = create_extractor(given.backbone, given.weights)
    features, kept, unread = extract(network, transform, given.images, listing.paths, given.batch_size)
    labels = listing.labels[kept]
    parts = split_samples(labels, classes, unseen, given.test_part, given.seed)
    arrays = {"features": features, "labels": labels, "files": np.array(listing.paths)[kept], "att": attributes,
              "allclasses": np.array(classes), "backbone": np.array(given.backbone), **parts}  # fmt: skip
    write_atomically(out, lambda file: np.savez(file, **arrays))
    for reason in unread:
        print(f"left out: {reason}")
    if listing.others:
        print(f"note: {passed_over(listing.others)}")
    sizes = "{:,} to train on, {:,} test samples of seen and {:,} of unseen ones".format(*map(len, parts.values()))
    print(f"{out}: {len(kept):,} features of {features.shape[1]} numbers, {len(classes)} classes ({sizes}).")
    print(f"Next: batchformer compare features-gzsl --data-root {out} --seeds 3")
    return 0


def choose_unseen(given: str, classes: list[str], seed: int) -> list[str]:
    """The classes that are never seen in training: so many, drawn by the seed, or those of a text file."""
    if not given.isdigit():
        names = [line.strip() for line in read_lines(Path(given)) if line.strip()]
        for name in names:
            if name not in classes:
                raise UserError(f"{given} names {name}, which is no class folder.{did_you_mean(name, classes)}")
    else:
        names = sorted(generator(seed, "unseen").permutation(classes)[: int(given)].tolist())
    if not 1 <= len({*names}) <= len(classes) - 2:
        raise UserError(
            f"--unseen {given} leaves {len(classes) - len(names)} of {len(classes)} classes to train on: at least two "
            "must be seen and one unseen."
        )
    return names


def split_samples(
    labels: np.ndarray, classes: list[str], unseen: list[str], part: float, seed: int
) -> dict[str, np.ndarray]:
    """Positions of the training samples, and of the test samples of seen and unseen classes."""
    found: dict[str, list[int]] = {"trainval_loc": [], "test_seen_loc": [], "test_unseen_loc": []}
    for label, name in enumerate(classes):
        members = generator(seed, name, "test").permutation(np.flatnonzero(labels == label)).tolist()
        if name in unseen:
            found["test_unseen_loc"] += members
            continue
        if len(members) < 2:
            raise UserError(
                f"class {name} has {len(members)} readable images: one is trained on and another tested on."
            )
        tested = min(max(1, round(part * len(members))), len(members) - 1)
        found["test_seen_loc"] += members[:tested]
        found["trainval_loc"] += members[tested:]
    return {name: np.sort(np.array(positions, np.int64)) for name, positions in found.items()}


def create_extractor(backbone: str, weights: str | None) -> tuple[Any, Any]:
    """A timm network without classifier, in eval mode on the best device, and its transform of an image."""
    import timm
    import torch

    from batchformer.models.create import OTHER_WEIGHTS, create_backbone

    if weights is not None and not Path(weights).is_file():
        raise UserError(f"--weights: there is no file {weights}.")
    overlay = {} if weights is None else {"pretrained_cfg_overlay": {"file": weights}}
    try:
        network = create_backbone(backbone, 0, pretrained=True, **overlay)
    except UserError as problem:  # the option of this command has another name
        raise UserError(str(problem).replace(OTHER_WEIGHTS, "give a file of them, --weights FILE")) from problem
    config = timm.data.resolve_model_data_config(network)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return network.eval().requires_grad_(False).to(device), timm.data.create_transform(**config, is_training=False)


def extract(
    network: Any, transform: Any, root: Path, paths: list[str], batch_size: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Features (images, width) in float32 of the images that can be read, their positions, and why others cannot."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    def read(path: str) -> Any:
        try:
            return transform(open_image(root / path.lstrip("/"), upright=True))
        except UserError as problem:
            return str(problem)

    device, values, kept, unread = next(network.parameters()).device, [], [], []
    bar = tqdm(total=len(paths), desc="features", unit="image", delay=2.0, disable=None)  # no bar in a file
    with bar, ThreadPoolExecutor() as pool, torch.inference_mode():
        for first in range(0, len(paths), batch_size):
            read_ones = dict(enumerate(pool.map(read, paths[first : first + batch_size]), first))
            images = {position: image for position, image in read_ones.items() if not isinstance(image, str)}
            unread += [reason for reason in read_ones.values() if isinstance(reason, str)]
            if images:
                values.append(network(torch.stack(list(images.values())).to(device)).float().cpu().numpy())
                kept += list(images)
            bar.update(len(read_ones))
    if not kept:
        raise UserError(f"none of the {len(paths)} images can be read; the first: {unread[0]}")
    return np.concatenate(values), np.array(kept), unread
