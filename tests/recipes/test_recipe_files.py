"""Recipe files: what they extend, what they say about themselves, and the task they name."""

import pytest
import torch
import yaml

from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.errors import UserError
from batchformer.models import create_backbone
from batchformer.models.create import OWN
from batchformer.recipes import (
    About,
    PaperRow,
    about,
    find_recipe,
    merge,
    read_recipe,
    recipe_groups,
    recipe_names,
    recipe_text,
)
from batchformer.tasks import Classification, LongTailed


def test_sections_are_merged_key_by_key():
    before = {"model": {"mix": {"mixup": 0.8, "cutmix": 1.0}, "blocks": [1, 2]}, "trainer": {"max_epochs": 3}}
    after = {"model": {"mix": {"cutmix": 0.0}, "blocks": [5]}}
    assert merge(before, after) == {
        "model": {"mix": {"mixup": 0.8, "cutmix": 0.0}, "blocks": [5]},
        "trainer": {"max_epochs": 3},
    }
    assert before["model"]["mix"]["cutmix"] == 1.0


def test_another_class_takes_no_arguments_over():
    before = {"data": {"class_path": "one", "init_args": {"imbalance": 100, "batch_size": 8}}}
    same = merge(before, {"data": {"class_path": "one", "init_args": {"batch_size": 4}}})
    assert same["data"]["init_args"] == {"imbalance": 100, "batch_size": 4}
    other = merge(before, {"data": {"class_path": "other", "init_args": {"batch_size": 4}}})
    assert other["data"]["init_args"] == {"batch_size": 4}


def test_a_row_of_a_table_is_its_parent_with_its_own_fields():
    parent, row = (read_recipe(find_recipe(name)[1]) for name in ("deit-ti-cifar100-100", "deit-b-cifar100-300"))
    assert row["trainer"].pop("max_epochs") == 300
    assert row["model"].pop("backbone") == "deit_base_patch16_224"
    del parent["trainer"]["max_epochs"], parent["model"]["backbone"]
    assert row.pop("about")["title"] != parent.pop("about")["title"]
    assert row == parent


@pytest.mark.parametrize(
    ("name", "blocks", "share"),
    [
        ("1-12", "all", True),
        ("4-12", [*range(3, 12)], True),
        ("8-12", [*range(7, 12)], True),
        ("not-shared", "all", False),
    ],
)
def test_positions_of_the_papers_table_8(name, blocks, share):
    """The paper counts from 1."""
    options = read_recipe(find_recipe(f"deit-s-imagenet-lt-{name}")[1])["model"]["batchformer"]
    assert (options["blocks"], options["share"]) == (blocks, share)


def test_officehome_is_trained_as_tll_does_with_moving_batch_norm_and_pacs_with_a_frozen_one():
    rows = {name: read_recipe(find_recipe(name)[1])["model"] for name in ("pacs-r50-irm", "office-home-r50-irm")}
    told = {name: (row["freeze_batch_norm"], row["backbone_args"]["drop_rate"]) for name, row in rows.items()}
    assert told == {"pacs-r50-irm": (True, 0.1), "office-home-r50-irm": (False, 0.0)}


def test_the_networks_of_unseen_domains_are_built_at_their_own_size():
    """Not only in small: a recipe passes on the arguments of the one it extends."""
    networks = {}
    for name in recipe_groups()["Unseen domains, BatchFormer"]:
        model = read_recipe(find_recipe(name)[1])["model"]
        networks[model["backbone"], str(model["backbone_args"])] = model
    assert len(networks) > 4
    for model in networks.values():
        arguments = dict(model["backbone_args"])
        if model["backbone"] not in OWN:
            arguments.pop("pretrained", None)  # nothing is fetched
        with torch.device("meta"):
            create_backbone(model["backbone"], 7, **arguments)
    with pytest.raises(UserError, match=r"^there are no pretrained weights of resnet50_stride_in_1x1 to fetch"):
        create_backbone("resnet50_stride_in_1x1", 7, pretrained=True)


def test_networks_of_long_tails_begin_as_released():
    """Every BatchNorm weight at 1, those of timm's ResNets too, unless weights are loaded anyway."""
    networks = {}
    for name in recipe_groups()["Long-tailed recognition, BatchFormer"]:
        model = read_recipe(find_recipe(name)[1])["model"]
        arguments = model.get("backbone_args", {})
        if about(name).paper is not None and not arguments.get("pretrained"):
            networks[model["backbone"], str(arguments)] = arguments
    assert {backbone for backbone, _ in networks} >= {"resnet10", "resnet32", "resnet50"}
    for (backbone, _), arguments in networks.items():
        net = create_backbone(backbone, 7, **arguments)
        norms = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        assert all(bool((norm.weight == 1).all()) for norm in norms), backbone


def test_a_file_extends_one_beside_it_and_a_saved_recipe_still_extends_the_shipped_one(tmp_path):
    (tmp_path / "saved.yaml").write_text(recipe_text("deit-s-cifar100-100"))
    (tmp_path / "mine.yaml").write_text("extends: saved.yaml\ntrainer: {max_epochs: 7}\n")
    config = RecipeCLI().load(tmp_path / "mine.yaml", [("model.batchformer.blocks", "[8]")])
    assert config["trainer"]["max_epochs"] == 7
    assert config["model"]["backbone"] == "deit_small_patch16_224"
    assert config["model"]["batchformer"]["blocks"] == [8]
    assert config["data"]["init_args"]["image_size"] == 224
    assert config["task"] == "classification"


def test_the_resolved_recipe_is_a_recipe_of_the_same_task(tmp_path):
    cli = RecipeCLI()
    for name, kind in (("vit-digits", Classification), ("digits-lt", LongTailed)):
        config = cli.load(find_recipe(name)[1])
        (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(config))
        assert cli.load(tmp_path / "resolved.yaml") == config
        assert type(cli.build()[0]) is kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: vit-digit", "Did you mean vit-digits"),
        ("extends: mine.yaml", "in turn"),
        ("extends: [a]", "expected the name of a recipe"),
        ("extends: digits-lt\ntask: clasification", "Did you mean classification"),
        ("extends: vit-digits\nmodel: {mixx: {mixup: 1}}", "Did you mean model.mix"),
        ("extends: vit-digits\nmodel: {batchformer: {block: 3}}", "Did you mean model.batchformer.blocks"),
    ],
)
def test_mistakes_are_named(tmp_path, text, expected):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=expected.replace(".", r"\.").replace("[", r"\[")):
        RecipeCLI().load(tmp_path / "mine.yaml")


def test_every_row_of_tables_6_and_7_has_a_name():
    names = set(recipe_names())
    assert {f"deit-{size}-cifar100-{epochs}" for size in ("ti", "s", "b") for epochs in (100, 300)} <= names
    assert {f"deit-{size}-imagenet" for size in ("ti", "s", "b")} <= names
    assert {"resnet50-imagenet", "vit-cifar100-32", "vit-digits"} <= names


def test_the_learning_rate_of_table_9_is_in_proportion_to_the_batch():
    for size in (16, 32, 64, 256, 512):
        recipe = read_recipe(find_recipe(f"imagenet-lt-r10-batch{size}")[1])
        assert recipe["data"]["init_args"]["batch_size"] == size
        assert recipe["model"]["optimizer"]["lr"] == pytest.approx(0.05 * size / 128)


def test_a_file_outside_the_package_inherits_what_the_shipped_recipe_says_about_data_and_size(tmp_path):
    parent = about("deit-s-imagenet")
    (tmp_path / "mine.yaml").write_text("extends: deit-s-imagenet\ntrainer: {max_epochs: 7}\n")
    (tmp_path / "beside.yaml").write_text("about: {title: Mine, small: {data.batch_size: 4}}\nextends: mine.yaml\n")
    assert about(tmp_path / "mine.yaml") == About("mine", parent.group, "imagenet", None, parent.small)
    assert about(tmp_path / "beside.yaml") == About("Mine", parent.group, "imagenet", None, {"data.batch_size": 4})
    config = RecipeCLI().load(tmp_path / "mine.yaml", about(tmp_path / "mine.yaml").small_overrides())
    assert config["trainer"]["max_epochs"] == 7
    assert config["data"]["init_args"]["image_size"] == 32


def test_the_row_of_a_paper_is_not_inherited():
    row = about("deit-s-tiny-imagenet").paper
    assert isinstance(row, PaperRow)
    assert (row.table, row.numbers["batchformer"]) == ("V2, Table 13", {"top1": 82.9, "top5": 94.3})
    assert about("deit-ti-imagenet-transmix").paper is None
    assert read_recipe(find_recipe("deit-ti-imagenet-transmix")[1])["about"].keys() == {
        "title", "group", "needs", "small"
    }  # fmt: skip


def test_what_a_caller_changes_in_a_recipe_does_not_stay(tmp_path):
    file = find_recipe("digits-lt")[1]
    read_recipe(file)["about"]["small"].clear()
    read_recipe(file)["model"]["optimizer"].clear()
    about("digits-lt").small.clear()
    assert read_recipe(file)["model"]["optimizer"]
    assert about("digits-lt").small == read_recipe(file)["about"]["small"] != {}


def test_variants_and_stages_take_the_place_of_inherited_ones(tmp_path):
    (tmp_path / "parent.yaml").write_text(
        "extends: digits-lt\nvariants: {erm: {model.method: baseline}, mine: {}}\nstages: [{name: one}, {name: two}]\n"
    )
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\nvariants: {other: {}}\n")
    content = read_recipe(tmp_path / "child.yaml")
    assert content["variants"] == {"other": {}}
    assert content["stages"] == [{"name": "one"}, {"name": "two"}]


def test_a_task_given_as_a_class_is_its_name_with_the_arguments_in_model(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "extends: digits-lt\n"
        "task: {class_path: package.Task, init_args: {backbone: resnet18, optimizer: {lr: 0.5}}}\n"
        "model: {optimizer: {lr: 0.25}}\n"
    )
    content = read_recipe(tmp_path / "mine.yaml")
    assert content["task"] == "package.Task"
    assert content["model"]["backbone"] == "resnet18"
    assert content["model"]["optimizer"] == {"lr": 0.25, "momentum": 0.9, "weight_decay": 5e-4, "module_lr_factor": 0.1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("about: {titel: x}", "there is no key titel. Did you mean title?"),
        ("about: {zzz: x}", "There are: title, group, needs, paper, small"),
        ("about: Mine", "expected some of title, group, needs, paper, small, got Mine"),
        ("about: {title: [1]}", "about.title in FILE: expected words"),
        ("about: {small: 3}", "about.small in FILE: expected keys and values, got 3"),
        ("about: {paper: {table: Table 1, row: x}}", "about.paper in FILE has no numbers"),
        ("about: {paper: {tabel: Table 1}}", "about.paper in FILE: there is no key tabel. Did you mean table?"),
        ("about: {paper: {table: T, row: x, numbers: {top1: 3}}}", "expected numbers by variant and measure"),
        ("about: {paper: {table: T, row: x, numbers: {baseline: {top1: a}}}}", "expected numbers by variant"),
        ("task: {init_args: {a: 1}}", "expected a name, or class_path and init_args"),
    ],
)
def test_mistakes_in_what_a_recipe_says_about_itself_are_one_sentence(tmp_path, text, expected):
    (tmp_path / "mine.yaml").write_text(f"extends: digits-lt\n{text}\n")
    with pytest.raises(UserError) as caught:
        read_recipe(tmp_path / "mine.yaml")
    assert expected.replace("FILE", str(tmp_path / "mine.yaml")) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_paper_has_no_mistake_of_typing():
    """All is the mean of many, medium and few, weighted by their classes."""
    classes = {
        "cifar100-lt-100": (35, 35, 30),
        "cifar100-lt-200": (30, 31, 39),
        "imagenet-lt-r10": (385, 479, 136),
        "imagenet-lt-r50": (385, 479, 136),
        "cifar100-lt-100-ride": (35, 35, 30),
        **{f"imagenet-lt-{net}-ride{kind}": (385, 479, 136)
           for net in ("r10", "r50") for kind in ("", "-two-stage", "-distilled")},
        "inaturalist18-ride": (842, 4076, 3224),
        **{f"cifar100-lt-100-{name}": (35, 35, 30) for name in ("paco", "paco-balanced")},
        **{f"cifar100-lt-200-{name}": (30, 31, 39) for name in ("paco", "paco-balanced")},
        "imagenet-lt-r50-paco": (385, 479, 136),
        "places-lt-paco": (131, 163, 71),
        "imagenet-lt-r50-single": (385, 479, 136),
        **{f"imagenet-lt-r10-batch{size}": (385, 479, 136) for size in (16, 32, 64, 256, 512)},
        **{f"imagenet-lt-r10-layers{layers}": (385, 479, 136) for layers in (2, 4, 8, 16)},
        "places-lt-balms": (131, 163, 71),
    }  # fmt: skip
    for recipe, sizes in classes.items():
        for row in about(recipe).paper.numbers.values():
            weighted = sum(n * row[split] for n, split in zip(sizes, ("many", "medium", "few"), strict=True))
            assert row["accuracy"] == pytest.approx(weighted / sum(sizes), abs=0.75), recipe


@pytest.mark.parametrize("name", [name for name in recipe_names() if about(name).paper is not None])
def test_the_numbers_of_a_paper_are_those_the_comment_quotes(name):
    paper, comment = about(name).paper, " ".join(recipe_text(name).split("\nabout:")[0].replace("#", " ").split())
    variant = list(paper.numbers)[-1]
    first = next(iter(paper.numbers[variant].values()))
    assert f" {first:g}" in comment.replace(".0", "")
