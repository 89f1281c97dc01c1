"""Pictures of pre-training: nearest neighbours of test images; reconstructions of MAE, and attention in its decoder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from batchformer.analysis.after_training import attend_locally, evenly_spaced_samples
from batchformer.analysis.batch_attention import AttentionOverBatch, attention_over_batch
from batchformer.analysis.drawing import MORE, captioned, contact_sheet, tile, to_pictures, write_index
from batchformer.analysis.pictures import MASS_CAPTION, MOST_SHOWN, draw_attention_masses, shown_of
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.losses.self_supervised import patch_statistics

NEIGHBOURS, RECONSTRUCTIONS = "neighbours", "reconstructions"  # folders in the run folder
_NEAREST = 5
_BATCH = 32  # images that attend to each other in MAE's pictures
_GREY = 0.5
_ORDINALS = ("nearest training image", "second", "third", "fourth", "fifth")


# ---- nearest neighbours


def neighbours_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """Test images and the training images that the k-NN classifier finds nearest to them; no entry without it."""
    if not task.judge.neighbours:
        return {}
    device, precision = trainer.strategy.root_device, trainer.strategy.precision_plugin
    task.net.to(device).eval()

    def features(images: Tensor) -> Tensor:
        with torch.no_grad(), precision.forward_context():
            return task.features(precision.convert_input(images.to(device))).float()

    queries = evenly_spaced_samples(data.evaluation_loader(task.evaluation_sets[0]), MOST_SHOWN, "images", "labels")
    found, searched = nearest_samples(features, queries["images"], data.spaced_train_loader(task.judge.images))
    classes, normalised = [str(name) for name in task.data_info.classes], (data.mean, data.std)
    rows = [("test images", _named(to_pictures(queries["images"], *normalised), queries["labels"], classes))]
    for place in range(found["labels"].shape[1]):
        pictures, labels = to_pictures(found["images"][:, place], *normalised), found["labels"][:, place]
        rows.append((_ORDINALS[place], _named(pictures, labels, classes, queries["labels"])))
    right = 100 * (found["labels"] == queries["labels"][:, None]).float().mean().item()
    caption = (
        f"By the cosine of features, among {searched:,} unaugmented training images; orange: of another class, which "
        f"the training never saw. {right:.0f} % of these are of the class of their test image."
    )
    made = [("neighbours.jpg", contact_sheet(rows), "Nearest training images", caption)]
    write_index(Path(trainer.default_root_dir) / NEIGHBOURS, made, keep=False)
    return {"sections": [{"title": "Nearest neighbours", "pictures": NEIGHBOURS}]}


def nearest_samples(
    features: Any, queries: Tensor, loader: Iterable[Any], count: int = _NEAREST
) -> tuple[dict[str, Tensor], int]:
    """Of each query the `count` nearest samples of a loader (`images`, `labels`, `cosines`), nearest first.

    Goes once through the loader and keeps only what is nearest so far, so that it serves any number of images. Also
    returns how many samples were compared.
    """
    query_features = F.normalize(features(queries), dim=1)
    kept: dict[str, Tensor] = {}
    seen = 0
    for batch in map(as_batch, loader):
        images, labels = batch["images"], batch["labels"].cpu()
        cosines = (query_features @ F.normalize(features(images), dim=1).T).cpu()
        seen += len(images)
        best, place = cosines.topk(min(count, len(images)), dim=1)
        new = {"cosines": best, "labels": labels[place], "images": images.cpu()[place]}
        kept = {name: torch.cat([kept[name], rows], 1) if kept else rows for name, rows in new.items()}
        first = kept["cosines"].argsort(dim=1, descending=True, stable=True)[:, :count]
        rows_of = torch.arange(len(first))[:, None]
        kept = {name: rows[rows_of, first] for name, rows in kept.items()}
    return kept, seen


def _named(
    pictures: list[Image.Image], labels: Tensor, classes: list[str], wanted: Tensor | None = None
) -> list[Image.Image]:
    """Tiles with the name of their class, orange where it is not the wanted one."""
    wrong = torch.zeros_like(labels) if wanted is None else labels != wanted
    return [
        captioned(tile(picture), classes[label], MORE) if off else captioned(tile(picture), classes[label])
        for picture, label, off in zip(pictures, labels.tolist(), wrong.tolist(), strict=True)
    ]


# ---- masked autoencoders


def reconstructions_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """Masked test images, what the plain and the related stream make of them, and the batch attention."""
    device, precision = trainer.strategy.root_device, trainer.strategy.precision_plugin
    net, attachment = task.net.to(device).eval(), task.attachment
    images = evenly_spaced_samples(data.evaluation_loader(task.evaluation_sets[0]), _BATCH, "images")["images"]
    images = images.to(device)
    noise = torch.rand(len(images), net.patches, generator=torch.Generator().manual_seed(0)).to(device)
    streams: dict[str, Tensor] = {}
    with torch.no_grad(), precision.forward_context():
        entered = precision.convert_input(images)
        if attachment is None:
            streams["prediction"] = net(entered, noise).float()
        else:
            with attachment.disabled():
                streams["plain stream"] = net(entered, noise).float()
            with attend_locally(attachment), attachment.infer_with_batch():
                streams["related stream"] = net(entered, noise).float()
    mask, normalise = net.mask(noise), task.decoder_options.normalise_pixels
    made = []
    for pasted, words in ((True, "with the visible patches pasted in"), (False, "all patches as predicted")):
        sheet = draw_reconstructions(net, images, mask, streams, normalise, pasted, data.mean, data.std)
        note = "Patches are predicted up to their mean and contrast, which are taken from the image. " * normalise
        caption = f"{mask.mean().item():.0%} of the patches are masked. {note}{_STREAMS * (attachment is not None)}"
        file = f"reconstructions{'' if pasted else '-whole'}.jpg"
        made.append((file, sheet, f"Masked images and what is made of them, {words}", caption))
    section: dict[str, Any] = {"title": "Reconstructions", "pictures": RECONSTRUCTIONS}
    attended = _decoder_attention(net, attachment, entered, noise, precision) if attachment is not None else {}
    if attended and len(images) > 1:
        masked = to_pictures(blanked(net, images, mask), data.mean, data.std)
        rows = {f"where the others look {each.side} {path}": each for path, each in attended.items()}
        note = MASS_CAPTION.format(images=f"{len(shown_of(len(images)))} of {len(images)} images")
        made.append(("attention.jpg", draw_attention_masses(rows, masked), "Batch attention in the decoder", note))
        section["text"] = _TABLE
        section["table"] = {
            "header": ["module", "to images that show the patch", "to images that mask it", "to itself"],
            "rows": [[path, *(f"{factor:.2f}x" for factor in attention_of_masked(each, mask.cpu()))]
                     for path, each in attended.items()],
        }  # fmt: skip
    write_index(Path(trainer.default_root_dir) / RECONSTRUCTIONS, made, keep=False)
    return {"sections": [section]}


_STREAMS = (
    f"The related stream attended over at most {_BATCH} images, without dropout; at test time there is only the plain "
    "one."
)
_TABLE = (
    "How a masked patch of one image attends to the same place of the images of its batch, in multiples of uniform "
    "attention; mean over heads, positions and images."
)


def draw_reconstructions(
    net: Any,
    images: Float[Tensor, "batch 3 height width"],
    mask: Float[Tensor, "batch patches"],
    streams: dict[str, Float[Tensor, "batch patches pixels"]],
    normalised: bool,
    pasted: bool,
    mean: Any = None,
    std: Any = None,
) -> Image.Image:
    """Rows: the masked images, what each stream predicts, the images."""
    shown = shown_of(len(images))

    def tiles(pixels: Tensor) -> list[Image.Image]:
        return [tile(picture) for picture in to_pictures(pixels[shown], mean, std)]

    made = {name: reconstructed(net, found, images, mask, normalised, pasted) for name, found in streams.items()}
    return contact_sheet(
        [
            ("what the encoder is shown", tiles(blanked(net, images, mask))),
            *((name, tiles(pixels)) for name, pixels in made.items()),
            ("original", tiles(images)),
        ]
    )


def reconstructed(
    net: Any,
    predictions: Float[Tensor, "batch patches pixels"],
    images: Float[Tensor, "batch 3 height width"],
    mask: Float[Tensor, "batch patches"],
    normalised: bool,
    pasted: bool,
) -> Float[Tensor, "batch 3 height width"]:
    """Predictions as images: scaled back where targets were normalised; `pasted`: visible patches are the image's."""
    patches = net.patchify(images)
    if normalised:
        mean, deviation = patch_statistics(patches)
        predictions = predictions * deviation + mean
    return net.unpatchify(torch.where(mask[..., None] > 0, predictions, patches) if pasted else predictions)


def blanked(net: Any, images: Tensor, mask: Float[Tensor, "batch patches"]) -> Tensor:
    """The images with a plain grey at masked patches: the middle of each image's range."""
    grey = images.amin((1, 2, 3)) * _GREY + images.amax((1, 2, 3)) * (1 - _GREY)
    patches = torch.where(mask[..., None] > 0, grey[:, None, None], net.patchify(images))
    return net.unpatchify(patches)


def attention_of_masked(
    attention: AttentionOverBatch, mask: Float[Tensor, "batch patches"]
) -> tuple[float, float, float]:
    """Attention of masked patches in multiples of uniform attention: to visible ones, other masked ones, itself.

    A related row may read a patch that it does not see in another image, which shows it at this place; the first number
    is above 1 where the module has learnt to.
    """
    weights = attention.weights[attention.layout.prefix :]  # patches, batch, batch
    hidden = mask.T.bool()
    itself = torch.eye(weights.shape[-1], dtype=torch.bool)
    targets = [~hidden[:, None, :] & ~itself, hidden[:, None, :] & ~itself, itself[None]]
    masked = hidden[:, :, None]
    found = [weights[(masked & target).expand_as(weights)] * weights.shape[-1] for target in targets]
    first, second, third = (float(each.mean()) if len(each) else float("nan") for each in found)
    return first, second, third


def _decoder_attention(
    net: Any, attachment: Any, images: Tensor, noise: Tensor, precision: Any
) -> dict[str, AttentionOverBatch]:
    """Attention of the first and the last module in the decoder, by path."""
    paths = [point.paths[0] for point in attachment.points if point.paths[0].startswith("decoder_blocks.")]
    chosen = dict.fromkeys([*paths[:1], *paths[-1:]])
    with attend_locally(attachment), precision.forward_context():
        return {path: attention_over_batch(net, images, path, noise=noise) for path in chosen}
