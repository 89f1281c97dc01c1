"""Short options and recipe keys are told apart, and mistakes are named."""

import pytest

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.compare import read_seeds
from batchformer.errors import UserError

OPTIONS = [Option("out"), Option("resume", "nothing"), Option("seeds", "many")]


def test_options_keys_and_positional_arguments_are_split():
    given = read_arguments(
        ["digits-lt", "--seeds", "0", "1", "--out=a/b", "--trainer.max_epochs", "3", "--resume", "--data.x=-1"],
        OPTIONS,
        recipe_keys=True,
    )
    assert given.positional == ["digits-lt"]
    assert given.values == {"seeds": ["0", "1"], "out": ["a/b"], "resume": []}
    assert given.recipe_keys == [("trainer.max_epochs", "3"), ("data.x", "-1")]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ot", "x"], "Unknown option --ot. Did you mean --out?"),
        (["--resum"], "Did you mean --resume?"),
        (["--out"], "--out needs a value"),
        (["--out", "--resume"], "--out needs a value"),
        (["--resume=yes"], "--resume takes no value"),
        (["-x"], "options start with two dashes"),
    ],
)
def test_mistakes_are_named(args, message):
    with pytest.raises(UserError) as caught:
        read_arguments(args, OPTIONS, recipe_keys=True)
    assert message in str(caught.value)


def test_an_abbreviated_option_is_not_accepted():
    with pytest.raises(UserError, match="Unknown option --res"):
        read_arguments(["--res"], OPTIONS)


@pytest.mark.parametrize(
    ("words", "seeds"), [(["3"], [0, 1, 2]), (["1"], [0]), (["4", "9"], [4, 9]), (["0,2"], [0, 2])]
)
def test_seeds_are_a_count_or_a_list(words, seeds):
    assert read_seeds(words) == seeds


@pytest.mark.parametrize("words", [["x"], ["0"], ["-1"], ["1", "1"]])
def test_seeds_that_make_no_sense_are_refused(words):
    with pytest.raises(UserError, match="--seeds"):
        read_seeds(words)
