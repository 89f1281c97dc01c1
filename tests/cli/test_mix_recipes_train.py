"""Every shipped recipe of a mixing method trains two steps and evaluates on a miniature, its network made small."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from batchformer.cli import main
from batchformer.cli.shelf import recipe_names
from batchformer.data.sets import write_miniature

from .test_detection_recipes_train import RECIPES as DETECTION
from .test_panoptic_commands import RECIPES as PANOPTIC
from .test_recipes_train import NARROW_ARRAYS, NARROW_FILES, SHALLOW_FILES, SMALL_FILES, THIN_ARRAYS, TWO_STEPS
from .test_recipes_train import RECIPES as OTHERS


def small(**arguments):
    return {**SMALL_FILES, **{f"model.backbone_args.{key}": value for key, value in arguments.items()}}


EXTRACTED = ("attentive-cutmix", "saliencymix", "puzzlemix")
DEPTHS = tuple(f"transmix-{d}" for d in ("d6", "d8", "d10", "rollout"))
VIT = ("mixup", "cutmix", *EXTRACTED, "transmix", *DEPTHS)
STEPS = ("aug-none", "aug-base", "aug-randaug")
# a few images of the test set: bfloat16 convolutions, 56 of them, take their time on a CPU
DEEP_ARRAYS = {**THIN_ARRAYS, "data.eval_batch_size": "20", "trainer.limit_val_batches": "1"}
DISTILLED = {"model.distillation.teacher": "test_resnet"}
RECIPES = {
    **{f"deit-s-imagenet-{name}": NARROW_FILES for name in (*VIT, *STEPS)},
    **{f"deit-{size}-imagenet-transmix": NARROW_FILES for size in ("ti", "b")},
    **{f"deit-{size}-imagenet-transmix-distilled": {**NARROW_FILES, **DISTILLED} for size in ("s", "b")},
    "pvt-v2-b2-imagenet-transmix": {**small(embed_dims="[8,16,40,64]", depths="[1,1,1,3]"), "data.image_size": "64"},
    "cait-xxs24-imagenet-transmix": small(img_size="32", patch_size="16", embed_dim="24"),
    "xcit-s12-imagenet-transmix": small(img_size="32", patch_size="16", embed_dim="24"),
    "swin-t-imagenet-transmix": {**small(img_size="64", embed_dim="24"), "data.image_size": "64"},
    **{f"resnet50-imagenet-{name}": SHALLOW_FILES for name in ("300", "cutmix", *EXTRACTED)},
    **{f"vit-cifar100-32-{name}": NARROW_ARRAYS for name in (*VIT, *STEPS, "aug-mixup", "aug-cutmix", "aug-transmix")},
    **{f"resnet56-cifar100{name}": DEEP_ARRAYS for name in ("", "-cutmix", *(f"-{each}" for each in EXTRACTED))},
}
# With the module too, where it stands at another place than in the recipes above them.
WITH_MODULE = ["deit-s-imagenet-transmix", "pvt-v2-b2-imagenet-transmix", "swin-t-imagenet-transmix",
               "cait-xxs24-imagenet-transmix", "xcit-s12-imagenet-transmix",
               "vit-cifar100-32-transmix", "resnet56-cifar100"]  # fmt: skip


def test_every_recipe_is_tried_somewhere():
    assert set(recipe_names()) == {*RECIPES, *OTHERS, *DETECTION, *PANOPTIC}
    assert not set(RECIPES) & set(OTHERS)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mini")
    torch.manual_seed(0)
    made = {layout: str(write_miniature(layout, folder / layout)) for layout in ("imagenet", "cifar100")}
    classes = len(list((folder / "imagenet" / "train").iterdir()))
    for name, count in (("extractor", 1000), ("teacher", classes)):
        made[name] = str(folder / f"{name}.safetensors")
        save_file(timm.create_model("test_resnet", num_classes=count).state_dict(), made[name])
    return made


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "baseline") for name in RECIPES), *((name, "batchformer") for name in WITH_MODULE)]
)
def test_recipe_trains_two_steps(name, method, files, tmp_path, capsys):
    given = {
        **TWO_STEPS,
        "trainer.limit_val_batches": "1",
        **RECIPES[name],
        "data-root": files["imagenet" if "imagenet" in name else "cifar100"],
    }
    if "attentive" in name:
        given |= {"model.mix.extractor": "test_resnet", "model.mix.extractor_checkpoint": files["extractor"],
                  "model.mix.extractor_size": "64"}  # fmt: skip
    if "distilled" in name:
        given["model.distillation.checkpoint"] = files["teacher"]
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    chosen = ["--method", method] if method == "batchformer" else []  # without the module unless asked for
    out = tmp_path / "run"

    assert main(["fit", name, *chosen, *words, "--out", str(out)]) == 0, capsys.readouterr().err

    result = json.loads((out / "result.json").read_text())
    assert (result["recipe"], result["method"], result["steps"]) == (name, method, 2)
    assert result["metrics"]["top1"] <= result["metrics"]["top5"] <= 100
    assert len(result["streams"]["related_loss"]) == (method == "batchformer")
