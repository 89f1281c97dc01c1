"""Pictures of pre-training: neighbours, reconstructions, attention in the decoder; as arrays and as files of a run."""

import json

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from batchformer.analysis.batch_attention import AttentionOverBatch
from batchformer.analysis.pretraining_pictures import (
    attention_of_masked,
    blanked,
    nearest_samples,
    neighbours_of,
    reconstructed,
    reconstructions_of,
)
from batchformer.data import DigitsLT
from batchformer.losses.self_supervised import patch_statistics
from batchformer.models.mae import MaskedAutoencoder
from batchformer.nn.token_layout import TokenLayout
from batchformer.tasks import MAE, MoCo

from ..tasks.conftest import make_trainer

VIT = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}


def autoencoder():
    torch.manual_seed(0)
    return MaskedAutoencoder(timm.create_model("vit_tiny_patch16_224", num_classes=0, **VIT), 16, 1, 2)


def test_neighbours_are_those_of_a_sorted_list():
    torch.manual_seed(0)
    images, labels, queries = torch.randn(40, 3, 2, 2), torch.randint(4, (40,)), torch.randn(3, 3, 2, 2)
    loader = [{"images": i, "labels": j} for i, j in zip(images.split(7), labels.split(7), strict=True)]
    found, searched = nearest_samples(lambda x: x.flatten(1)[:, :6], queries, loader, count=4)
    assert searched == 40
    for row, query in enumerate(queries):
        cosine = [float(F.cosine_similarity(query.flatten()[:6], one.flatten()[:6], dim=0)) for one in images]
        nearest = sorted(range(len(cosine)), key=lambda k: -cosine[k])[:4]
        assert torch.equal(found["images"][row], images[nearest])
        assert found["labels"][row].tolist() == labels[nearest].tolist()


def test_right_predictions_give_back_the_image_and_visible_patches_are_pasted():
    net, images = autoencoder(), torch.randn(2, 3, 8, 8)
    mask, patches = net.mask(torch.rand(2, 16)), net.patchify(images)
    mean, deviation = patch_statistics(patches)
    exact = reconstructed(net, (patches - mean) / deviation, images, mask, normalised=True, pasted=False)
    torch.testing.assert_close(exact, images, atol=1e-5, rtol=1e-5)
    whole, pasted = (
        reconstructed(net, torch.zeros_like(patches), images, mask, True, paste) for paste in (False, True)
    )
    expected = torch.where(mask[..., None] > 0, mean.expand_as(patches), patches)
    torch.testing.assert_close(net.patchify(pasted), expected)
    torch.testing.assert_close(net.patchify(whole), mean.expand_as(patches))
    assert torch.equal(reconstructed(net, patches + 1, images, mask, False, False), net.unpatchify(patches + 1))
    shown = net.patchify(blanked(net, images, mask))
    assert torch.equal(shown[mask == 0], patches[mask == 0])
    assert (shown[mask > 0].std(-1) == 0).all()


def test_attention_of_masked_patches_is_counted_one_by_one():
    torch.manual_seed(0)
    weights, mask = (
        torch.rand(1 + 4, 3, 3).softmax(-1),
        torch.tensor([[1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1]]).float(),
    )
    sums = {"shown": [], "masked": [], "itself": []}
    for patch in range(4):
        for i in range(3):
            for j in range(3):
                if mask[i, patch]:
                    kind = "itself" if i == j else "masked" if mask[j, patch] else "shown"
                    sums[kind].append(3 * float(weights[1 + patch, i, j]))
    found = attention_of_masked(AttentionOverBatch("x", weights, TokenLayout(5, 1, (2, 2))), mask)
    assert found == pytest.approx([sum(each) / len(each) for each in sums.values()], rel=1e-5)


def trained(task, folder):
    trainer = make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0, default_root_dir=folder)
    data = DigitsLT(imbalance=1.0, batch_size=16)
    trainer.fit(task, datamodule=data)
    return task, data, trainer


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
def test_a_masked_autoencoder_leaves_its_reconstructions_for_the_page(method, tmp_path):
    task = MAE("vit_tiny_patch16_224", VIT, method, {"heads": 2}, {"dim": 16, "depth": 2, "heads": 2})
    (section,) = reconstructions_of(*trained(task, tmp_path))["sections"]
    index = json.loads((tmp_path / section["pictures"] / "pictures.json").read_text())
    files = ["reconstructions.jpg", "reconstructions-whole.jpg"] + ["attention.jpg"] * (method == "batchformer")
    assert [entry["file"] for entry in index] == files
    heights = [Image.open(tmp_path / "reconstructions" / file).height for file in files]
    if method == "baseline":
        assert "table" not in section
        return
    assert [row[0] for row in section["table"]["rows"]] == ["decoder_blocks.0", "decoder_blocks.1"]
    assert heights[0] == 14 * 2 + 4 * (46 + 160 + 10)  # masked, plain, related, original
    pixels = Image.open(tmp_path / "reconstructions" / files[0]).convert("L")
    plain, related = (pixels.crop((28, top, 1378, top + 160)).tobytes() for top in (276, 492))
    assert plain != related
    assert neighbours_of(task, DigitsLT(), task.trainer) == {}  # its features are not for distances


def test_moco_leaves_a_sheet_of_neighbours(tmp_path):
    contrast = {"version": "v3", "hidden_dim": 16, "out_dim": 8}
    options = {"optimizer": {"name": "sgd", "lr": 0.1, "lr_per": None}, "judge": {"neighbours": 3}}
    task = MoCo("resnet20", {"widths": [4, 8, 8]}, "baseline", contrast=contrast, **options)
    assert "neighbours" in task.analyses
    (section,) = neighbours_of(*trained(task, tmp_path))["sections"]
    (entry,) = json.loads((tmp_path / section["pictures"] / "pictures.json").read_text())
    assert "among 1,450 unaugmented training images" in entry["caption"]
    assert Image.open(tmp_path / "neighbours" / entry["file"]).width == 2 * 28 + 8 * 170 - 10
