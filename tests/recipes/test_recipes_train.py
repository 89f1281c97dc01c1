"""Every shipped recipe trains two steps, evaluates and exports on a miniature of its data set.

What makes a recipe small, and which data it needs, it says itself (`about`). Recipes that differ in numbers only share
a test: of those that show no new `properties` the training is marked slow, but they are parsed all the same.
"""

import json
import math
import re

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from batchformer.cli import main, recipe_cli
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.data.sets import miniature_names, write_miniature
from batchformer.metrics.measures import measures_of, primary_of, with_current_names
from batchformer.recipes import GROUPS, about, find_recipe, merge, read_recipe, recipe_groups, recipe_names, recipe_text
from batchformer.runs.options import current_key

TWO_STEPS = {"trainer.max_epochs": "1", "trainer.limit_train_batches": "2", "trainer.accelerator": "cpu"}
ONLY_ON_A_GPU = {"compile", "cuda_graph", "channels_last"}
VARIANTS = ("baseline", "batchformer")
WITHOUT_MODULE = ("linear_probe", "region_detection")
# Seconds each; other fast tests train their code: a smaller recipe of the task, the tests of a reader or of TransMix
COSTLY = (
    "freihand-graphormer", "hands-rendered", "voc-faster-rcnn", "xcit-s12-imagenet-transmix",
    "pvt-v2-b2-imagenet-transmix", "cait-xxs24-imagenet-transmix", "swin-t-imagenet-transmix",
)  # fmt: skip
PANOPTIC_KEYS = {"sq", "rq", "pq_things", "sq_things", "rq_things", "pq_stuff", "sq_stuff", "rq_stuff", "ap"}


def small_recipe(name):
    """The recipe with its `small` keys, as plain values."""
    content = read_recipe(find_recipe(name)[1])
    for key, value in about(name).small.items():
        parts = key.split(".")
        if parts[0] == "data":
            parts.insert(1, "init_args")
        for part in reversed(parts):
            value = {part: value}
        content = merge(content, value)
    return content


def properties(name, variant):
    """What decides which code a training runs through: names, switches and places, but no sizes, rates or counts.

    One property for the data, and one for each group of options of the task (module, mixing, loss, ...) together with
    the network: groups do not meet elsewhere.
    """
    content = small_recipe(name)
    model = content["model"]
    network = (content.get("task"), *(family(model.get(part, "")) for part in ("backbone", "detector")))
    groups = {key: value for key, value in model.items() if isinstance(value, dict) and key != "batchformer"}
    groups["model"] = {key: model[key] for key in model.keys() - {"method", "backbone", *groups, *ONLY_ON_A_GPU}}
    return {
        ("data", about(name).needs, words(content["data"])),
        ("module", network, words(model.get("batchformer", {})) if variant == "batchformer" else None),
        *((key, network, words(value)) for key, value in groups.items()),
    }


def family(network):
    """Networks of one family differ in depth and width."""
    return re.sub(r"\d+|tiny|small|base", "", network)


def words(options):
    """The options that are no numbers, sorted; of lists of numbers whether there are several."""
    found = {}
    for key, value in options.items():
        if key == "dataset":  # of several in one layout
            continue
        if isinstance(value, dict):
            found[key] = words(value)
        elif isinstance(value, list) and not (value and isinstance(value[0], str)):
            found[key] = len(value) > 1
        elif isinstance(value, str | bool | list):
            found[key] = str(value)
    return tuple(sorted(found.items()))


def trainings():
    """All recipes with all variants; slow are costly ones, and those whose properties were all shown by one before."""
    shown, found = set(), []
    for name in (name for names in recipe_groups().values() for name in names):
        recipe = read_recipe(find_recipe(name)[1])
        own = recipe["model"].get("method", "batchformer")
        variants = ["default"] if recipe.get("task") in WITHOUT_MODULE else VARIANTS
        for variant in sorted(variants, key=lambda variant: variant != own):
            new = set() if name in COSTLY else properties(name, variant) - shown
            shown |= new
            found.append(pytest.param(name, variant, id=f"{name}-{variant}", marks=[] if new else pytest.mark.slow))
    return found


@pytest.fixture(scope="module")
def data_roots(tmp_path_factory):
    made = {}

    def root(needs):
        if needs not in made:
            made[needs] = write_miniature(needs, tmp_path_factory.mktemp(needs) / "data")
        return made[needs]

    return root


@pytest.fixture(scope="module")
def networks(data_roots, tmp_path_factory):
    """Weights that some recipes begin with: of an extractor of ImageNet's classes, of a teacher of the miniature's."""
    folder = tmp_path_factory.mktemp("networks")
    torch.manual_seed(0)
    for name, classes in (("extractor", 1000), ("teacher", len(list((data_roots("imagenet") / "train").iterdir())))):
        weights = timm.create_model("test_resnet", num_classes=classes).state_dict()
        save_file(weights, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def fit(data_roots, networks, tmp_path_factory):
    """(recipe, variant) -> its run folder, trained two steps; a second stage has its first one trained before."""
    made = {}

    def of(name, variant):
        if (name, variant) in made:
            return made[name, variant]
        described, model = about(name), read_recipe(find_recipe(name)[1])["model"]
        given = {**TWO_STEPS, **dict(described.small_overrides())}
        if described.needs is not None:
            given["data-root"] = str(data_roots(described.needs))
        if model.get("mix", {}).get("method") == "attentive-cutmix":
            given["model.mix.extractor_checkpoint"] = str(networks / "extractor.safetensors")
        if "distillation" in model:
            given["model.distillation.checkpoint"] = str(networks / "teacher.safetensors")
        if f"{name}-boxes" in recipe_names():
            given["init-from"] = f"detector={of(f'{name}-boxes', variant)}"
        if (teacher := name.replace("-distilled", "-teacher")) != name and teacher in recipe_names():
            given["init-from"] = f"teacher={of(teacher, variant)}"
        out = tmp_path_factory.mktemp(name) / "run"
        arguments = [word for key, value in given.items() for word in (f"--{key}", value)]
        method = [] if variant == "default" else ["--method", variant]
        assert main(["fit", name, *method, *arguments, "--out", str(out)]) == 0
        made[name, variant] = out
        return out

    return of


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_describes_itself_and_says_how_to_run_it(name):
    described = about(name)
    assert read_recipe(find_recipe(name)[1])["about"]["title"] == described.title
    assert len(described.title) < 120
    assert described.group in GROUPS
    assert described.needs is None or described.needs in miniature_names()
    comment = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    assert any(f"batchformer fit {name}" in line for line in comment)


@pytest.fixture(scope="module", autouse=True)
def parser():
    """One for all commands here: to make the parser of a task takes longer than most of these trainings."""
    shared = RecipeCLI()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_cli, "RecipeCLI", lambda trust=True: shared)
        yield shared


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_parsed_with_its_small_keys(name, parser):
    config = parser.load(find_recipe(name)[1], about(name).small_overrides())
    for key, value in about(name).small.items():
        found = config
        for part in current_key(key.replace("data.", "data.init_args.")).split("."):
            found = found[part]
        assert found == value, key


@pytest.mark.parametrize(("name", "variant"), trainings())
def test_recipe_trains_two_steps_evaluates_and_exports(name, variant, fit, tmp_path, capsys):
    out = fit(name, variant)
    result = with_current_names(json.loads((out / "result.json").read_text()))
    model, metrics = result["config"]["model"], result["metrics"]
    module = variant == "batchformer"
    assert (result["recipe"], result["variant"], result["steps"], result["protocol"]) == (name, variant, 2, "last")
    measures = [measure for measure in measures_of(result) if measure.key in metrics]
    primary = primary_of(measures)
    for measure in measures:
        low, high = measure.bounds
        assert metrics[measure.key] is None or low <= metrics[measure.key] <= (math.inf if high is None else high)
    assert result["history"][-1][primary.key] == metrics[primary.key]
    lengths = {len(result.get(name, ())) for name in ("per_class", "class_counts", "class_names")}
    assert len(lengths) == 1

    inside = any(model.get("batchformer", {}).get(key) for key in ("blocks", "after", "encoder_layers"))
    routed = model.get("algorithm") == "ride" and model["ride"]["train"] == "router"  # on frozen experts
    measured = not ({"adapt", "judge", "pairs", "contrast"} & model.keys() or inside or routed)
    assert ("gradient_influence" in result) == (module and measured)
    if "streams" in result:
        assert len(result["streams"]["related_loss"]) == module
        assert len(result["streams"]["plain_loss"]) == (not module or model["batchformer"]["streams"] != "single")
    if primary.key == "top1":
        assert metrics["top1"] <= metrics["top5"]
        assert ("streams" in result) == ("batchformer" in model)
    if primary.key == "ap":
        assert metrics["ap"] <= metrics["ap50"]
        assert ("ap_batch" in metrics) == (module and model["evaluate_with_batch"])
    if primary.key == "pq":
        assert set(metrics) >= PANOPTIC_KEYS

    if not module:  # whose file would have no trace of it anyway
        return
    assert main(["export", str(out), "--out", str(tmp_path / "model.safetensors")]) == 0, capsys.readouterr().err
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "batchformer" in key]  # noqa: SIM118
        assert json.loads(file.metadata().get("class_names", "[]")) == result.get("class_names", [])
