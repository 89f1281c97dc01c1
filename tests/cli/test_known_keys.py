"""Fields of recipes are known without torch: wrong ones are refused at once, and the shell completes them."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from batchformer.cli.completion import candidates
from batchformer.cli.known_keys import keys_of, refuse_unknown_keys, refuse_wrong_words
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.errors import UserError
from batchformer.recipes import find_recipe, read_recipe, recipe_names
from batchformer.runs.options import dotted

from ..selection import others_slow

PROGRAM = """
import json, sys
from batchformer.cli import main
code = main({arguments!r})
heavy = [name for name in ("torch", "lightning", "numpy", "jsonargparse") if name in sys.modules]
print(json.dumps([code, heavy]))
"""


def one_recipe_of_each_task_and_data():
    found = {}
    for name in recipe_names():
        recipe = read_recipe(find_recipe(name)[1])
        found.setdefault((recipe.get("task"), recipe["data"]["class_path"]), name)
    return sorted(found.values())


@pytest.mark.parametrize("name", others_slow(one_recipe_of_each_task_and_data(), {"digits-lt", "moco-digits"}))
def test_nothing_is_refused_that_the_parser_takes(name):
    file = find_recipe(name)[1]
    cli = RecipeCLI()
    values = dotted(cli.load(file))
    refuse_wrong_words(file, [(key, str(value)) for key, value in values.items() if key != "data.class_path"])
    found = {*values, *cli._current.own_keys()}
    keys = {key for key in found if "." in key and not key.endswith(".help")}
    refuse_unknown_keys(file, sorted(keys - {"data.class_path"}))
    assert len(keys_of(read_recipe(file)) & keys) > 90


@pytest.mark.parametrize(
    "key",
    ["trainer.max_epoch", "model.batchformer.head", "model.lr", "data.imbalanc", "run.thread", "modle.lr",
     "model.batchformer.heads.x"],
)  # fmt: skip
def test_keys_that_no_recipe_has_are_refused_as_the_parser_refuses_them(key):
    file = find_recipe("digits-lt")[1]
    with pytest.raises(UserError, match="Unknown key"):
        refuse_unknown_keys(file, [key])
    with pytest.raises(UserError):
        RecipeCLI().load(file, [(key, "3")])


@pytest.mark.parametrize(
    ("key", "value"),
    [("trainer.max_epochs", "three"), ("trainer.gradient_clip_val", "x"), ("trainer.detect_anomaly", "maybe"),
     ("data.init_args.imbalance", "big"), ("model.algorithm", "rides"), ("model.batchformer.heads", "x")],
)  # fmt: skip
def test_words_that_a_field_does_not_take_are_refused_as_the_parser_refuses_them(key, value):
    file = find_recipe("digits-lt")[1]
    with pytest.raises(UserError, match=rf"{key}: expected .*, got {value}") as at_once:
        refuse_wrong_words(file, [(key, value)])
    with pytest.raises(UserError) as parsed:
        RecipeCLI().load(file, [(key, value)])
    # Python keeps one Union of the same types, in the order of whoever wrote it first in this process
    alternatives = [set(re.split(", | or |expected ", str(error.value))) for error in (at_once, parsed)]
    assert alternatives[0] == alternatives[1]


@pytest.mark.parametrize("key", ["model.backbone_args.img_size", "trainer.logger.class_path", "run.init_from.head"])
def test_keys_below_open_values_are_left_to_the_parser(key):
    refuse_unknown_keys(find_recipe("digits-lt")[1], [key])


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "digits-lt", "--trainer.max_epoch", "3"],
        ["compare", "cifar100-lt-100", "--data.imbalanc", "3"],
        ["fit", "digits-lt", "--epoch", "3"],
        ["fit", "digits-lt", "--nonsense", "3"],
        ["fit", "digits-lt", "--epochs", "three"],
        ["compare", "digits-lt", "--model.algorithm", "rides"],
        ["tune", "digits-lt", "--data.batch_size", "big"],
        ["fit", "digits-lt", "--logger", "tb"],
        ["export", "run", "--format", "tflite"],
        ["completion", "words", "--", "fit", "digits-lt", "--model."],
    ],
)
def test_wrong_options_are_refused_without_importing_torch(arguments):
    program = PROGRAM.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    assert code == (0 if arguments[0] == "completion" else 2), done.stderr
    assert heavy == []


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (["com"], ["compare", "completion"], ["fit"]),
        (["fit", "digits-"], ["digits-lt", "digits-domains"], ["cifar100-lt-100"]),
        (["fit", "digits-lt", "--re"], ["--resume"], ["--seed"]),
        (["fit", "digits-lt", "--trainer.max_"], ["--trainer.max_epochs"], ["--trainer.devices"]),
        (["fit", "digits-lt", "--data."], ["--data.imbalance"], ["--data.init_args.imbalance"]),
        (["export", "run", "--f"], ["--format"], ["--model"]),
        (["export", "ru"], [], ["run"]),
    ],
)
def test_what_may_come_next(words, some, none):
    found = candidates(words)
    assert set(some) <= set(found)
    assert not set(none) & set(found)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_recipe(tmp_path):
    program = tmp_path / "batchformer"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m batchformer.cli "$@"\n')
    program.chmod(0o755)
    script = f"""PATH={tmp_path}:$PATH
eval "$(batchformer completion bash)"
COMP_WORDS=(batchformer fit digits-l); COMP_CWORD=2
_batchformer
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p batchformer"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "digits-lt"
    assert "-F _batchformer batchformer" in done.stdout
