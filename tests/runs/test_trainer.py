"""Settings of the trainer that cannot work are refused before it starts anything."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from batchformer.errors import UserError
from batchformer.runs.folder import RunFolder
from batchformer.runs.trainer import make_trainer, note_cpu_processes


def trainer(folder, **settings):
    return make_trainer(RunFolder(folder), {"accelerator": "cpu", "logger": False, **settings}, [], None)


@pytest.mark.parametrize(("cores", "most"), [(2, 8), (None, 4)])
def test_there_are_at_most_four_processes_a_core(tmp_path, monkeypatch, cores, most):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert trainer(tmp_path, devices=most).num_devices == most
    with pytest.raises(
        UserError, match=rf"devices {most + 1} would start .* {cores or 1} cores .* give {most} or fewer"
    ):
        trainer(tmp_path, devices=most + 1)


def test_batch_norm_over_processes_is_for_gpus(tmp_path):
    trainer(tmp_path, devices=1, sync_batchnorm=True)
    trainer(tmp_path, devices=2, sync_batchnorm=False)
    with pytest.raises(UserError, match="sync_batchnorm is for GPUs"):
        trainer(tmp_path, devices=2, sync_batchnorm=True)


def test_several_processes_on_the_cpu_are_told_of(tmp_path):
    said: list[str] = []
    for devices in (1, 2):
        note_cpu_processes(trainer(tmp_path, devices=devices), SimpleNamespace(say=said.append))
    assert len(said) == 1
    assert "trainer.devices 2 starts 2 processes on the CPU" in said[0]
