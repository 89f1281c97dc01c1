"""One tiny trained run for all commands."""

import pytest

from batchformer.cli import main

TINY = ["--trainer.max_epochs", "2", "--trainer.limit_train_batches", "2", "--data.batch_size", "32"]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny") / "run"
    assert main(["fit", "digits-lt", *TINY, "--out", str(out)]) == 0
    return out


@pytest.fixture
def say(capsys):
    """Run a command; returns (exit code, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
