"""Every shipped recipe trains two steps, evaluates and exports on a miniature of its official data layout.

Those of the mixing methods: test_mix_recipes_train, which also counts that none is forgotten.
"""

import json

import pytest
from safetensors import safe_open

from batchformer.cli import main
from batchformer.cli.shelf import recipe_names, recipe_text
from batchformer.data.sets import write_miniature

# Layout of the data and what makes it small enough for two CPU cores; the kind of model and the loss stay the recipe's.
SMALL_FILES = {"data.image_size": "32", "data.batch_size": "8", "data.eval_batch_size": "32", "data.workers": "0"}
SMALL_ARRAYS = {"data.batch_size": "16", "data.eval_batch_size": "150"}
# Depth and heads stay those of the recipe, so that its places exist; 24 divides by 3, 6 and 12 heads.
NARROW = {f"model.backbone_args.{key}": value for key, value in
          {"img_size": "32", "patch_size": "16", "embed_dim": "24"}.items()}  # fmt: skip
# Of ResNet-50 and ResNet-152: at their own width, weights and checkpoints take longer than all images.
SHALLOW = {"model.backbone_args.layers": "[1,1,1,1]", "model.backbone_args.channels": "[8,8,16,32]"}
SHALLOW_FILES = {**SMALL_FILES, **SHALLOW}
THIN_ARRAYS = {**SMALL_ARRAYS, "model.backbone_args.widths": "[4,8,16]"}  # of the ResNets of CIFAR, all their blocks
NARROW_ARRAYS = {**SMALL_ARRAYS, **NARROW, "data.image_size": "32"}
NARROW_FILES = {**SMALL_FILES, **NARROW}
RECIPES = {
    "digits-lt": (None, {"data.batch_size": "16"}),
    "cifar100-lt-100": ("cifar100", THIN_ARRAYS),
    "cifar100-lt-200": ("cifar100", THIN_ARRAYS),
    "cifar10-lt-100": ("cifar10", THIN_ARRAYS),
    "imagenet-lt-r10": ("imagenet-lt", SMALL_FILES),
    "imagenet-lt-r50": ("imagenet-lt", SHALLOW_FILES),
    "places-lt": ("places-lt", {**SHALLOW_FILES, "model.backbone_args.pretrained": "false"}),
    "inaturalist18": ("inaturalist18", SHALLOW_FILES),
    "folder-lt": ("folder", SMALL_FILES),
    "vit-digits": (None, {"data.batch_size": "16"}),
    "vit-cifar100-32": ("cifar100", NARROW_ARRAYS),
    **{
        f"deit-{size}-cifar100-{epochs}": ("cifar100", NARROW_ARRAYS)
        for size in ("ti", "s", "b")
        for epochs in (100, 300)
    },
    **{f"deit-s-tiny-imagenet{mix}": ("tiny-imagenet", NARROW_FILES) for mix in ("", "-no-mix", "-no-cutmix")},
    **{f"deit-{size}-imagenet": ("imagenet", NARROW_FILES) for size in ("ti", "s", "b")},
    "resnet50-imagenet": ("imagenet", SHALLOW_FILES),
    **{
        f"deit-s-imagenet-lt-{places}": ("imagenet-lt", NARROW_FILES)
        for places in ("1-12", "4-12", "8-12", "not-shared")
    },
}
# Without the module recipes of one kind differ in numbers only: one for each backbone, loss and layout.
ONE_OF_A_KIND = ["digits-lt", "cifar100-lt-100", "imagenet-lt-r10", "places-lt", "inaturalist18", "folder-lt",
                 "vit-digits", "deit-ti-cifar100-100", "deit-s-tiny-imagenet", "deit-b-imagenet", "resnet50-imagenet",
                 "deit-s-imagenet-lt-1-12"]  # fmt: skip
TWO_STEPS = {
    "trainer.max_epochs": "1",
    "trainer.limit_train_batches": "2",
    "trainer.accelerator": "cpu",
    "model.compile": "false",  # compiling for two steps takes longer than all the rest
    "model.schedule.warmup_epochs": "0",
}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_where_it_comes_from_and_how_to_run_it(name):
    comment = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    assert len(comment[0]) < 120
    assert any(f"batchformer fit {name}" in line for line in comment)


@pytest.fixture(scope="module")
def data_roots(tmp_path_factory):
    made = {}

    def root(layout):
        if layout not in made:
            made[layout] = write_miniature(layout, tmp_path_factory.mktemp(layout) / "data")
        return made[layout]

    return root


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "batchformer") for name in RECIPES), *((name, "baseline") for name in ONE_OF_A_KIND)]
)
def test_recipe_trains_evaluates_and_exports(name, method, data_roots, tmp_path, capsys):
    layout, small = RECIPES[name]
    words = [word for key, value in {**TWO_STEPS, **small}.items() for word in (f"--{key}", value)]
    root = [] if layout is None else ["--data-root", str(data_roots(layout))]
    out = tmp_path / "run"

    assert main(["fit", name, "--method", method, *root, *words, "--out", str(out)]) == 0, capsys.readouterr().err

    result = json.loads((out / "result.json").read_text())
    assert (result["recipe"], result["method"], result["steps"], result["protocol"]) == (name, method, 2, "last")
    assert 0 <= result["metrics"]["all"] <= 100
    assert len(result["per_class"]) == len(result["class_counts"]) == len(result["class_names"])
    assert result["history"][-1]["all"] == result["metrics"]["all"]
    before_classifier = not any(result["config"]["model"]["batchformer"].get(key) for key in ("blocks", "after"))
    assert ("gradient_influence" in result) == (method == "batchformer" and before_classifier)
    if result["config"].get("task") == "classification":
        assert result["metrics"]["top1"] == result["metrics"]["all"] <= result["metrics"]["top5"]
        assert len(result["streams"]["plain_loss"]) == 1
        assert len(result["streams"]["related_loss"]) == (method == "batchformer")

    assert main(["export", str(out), "--out", str(tmp_path / "model.safetensors")]) == 0, capsys.readouterr().err
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "batchformer" in key]  # noqa: SIM118
        assert file.metadata()["num_classes"] == str(len(result["class_counts"]))
        assert json.loads(file.metadata()["class_names"]) == result["class_names"]
