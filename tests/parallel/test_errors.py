"""What goes wrong between processes is said, on every process, with rank and shape."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch

import batchformer as bf
from batchformer.errors import UserError, warn_once
from batchformer.parallel import mean_loss_weight

DISAGREEMENTS = {
    "positions": ("(2, 4, 8)", "(2, 5, 8)"),
    "width": ("(2, 4, 8)", "(2, 4, 16)"),
    "dtype": ("float64", "float32"),
    "kind of mask": ("without a mask", "with a mask"),
    "layers": ("1 layers", "2 layers"),
    "group_size": ("1 layers)", "group_size=2)"),
    "kind of gradient": ("gradients of the weights", "no gradients"),
    "height and width of maps": ("a grid of 2 x 6", "a grid of 6 x 2"),
    "height and width of maps, flattened before": ("a grid of 2 x 2", "a grid of 4 x 1"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_disagreement_names_ranks_and_shapes_on_every_process(together, what: str) -> None:
    first, last = DISAGREEMENTS[what]
    messages = {rank["disagreements"][what] for rank in together[3]}
    assert len(messages) == 1
    (message,) = messages
    assert f"needs the same {what.split(',')[0]} on every process" in message
    said_of_first, said_of_last = message.split("rank 0 has ")[1].split("rank 2 has ")
    assert first in said_of_first
    assert last in said_of_last


def test_after_a_disagreement_the_processes_can_go_on(together) -> None:
    assert {rank["disagreements"][""] for rank in together[3]} == {"nothing was said"}


def test_groups_that_never_span_processes_are_told_of_once(together) -> None:
    first, second = (rank["told_that_groups_are_apart"] for rank in together[2])
    apart = ["2 of (4, 2)", "4 of (4, 3)"]
    for case, said in first.items():
        assert len(said) == (case in apart), case
        assert all("relates nothing across processes" in sentence for sentence in said)
    assert not any(second.values())  # one of the processes says it


def test_without_positions_every_process_gets_both_streams_of_nothing(together) -> None:
    assert [rank["no_positions"]["out"].shape[:2] for rank in together[2]] == [(4, 0), (6, 0)]


def test_a_process_that_dies_is_named_by_the_survivors(together) -> None:
    for rank in (0, 2):
        message = together[3][rank]["someone_dies"]["error"]
        assert f"rank {rank} lost its peers while exchanging the sizes of (2, 4, 8) float64" in message
        assert "no word from rank 1;" in message


def test_a_process_that_stays_away_is_named_after_the_timeout(together) -> None:
    assert "no word from rank 1;" in together[2][0]["someone_stays_away"]["error"]


def test_without_processes_it_warns_once_and_attends_locally() -> None:
    warn_once.cache_clear()
    torch.manual_seed(0)
    ours = bf.BatchFormer(8, 2, dropout=0.0, scope="global")
    torch.manual_seed(0)
    local = bf.BatchFormer(8, 2, dropout=0.0)
    x = torch.randn(5, 8)
    with pytest.warns(UserWarning, match="torch.distributed is not initialised"):
        out = ours(x)
    assert torch.equal(out, local(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ours(x), out)
        assert ours.eval()(x) is x


def test_attach_passes_the_scope_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    attachment = bf.attach(model, scope="global", process_group=2, heads=2)
    assert "scope='global' over 2 consecutive processes" in repr(attachment.points[0].module)
    assert attachment.points[0].module.scope == "global"
    copied = pickle.loads(pickle.dumps(model))
    assert bf.attachment_of(copied).points[0].module.members.process_group == 2


@pytest.mark.parametrize("keywords", [{"scope": "world"}, {"process_group": 0}, {"process_group": "node"}])
def test_a_wrong_keyword_is_refused(keywords) -> None:
    with pytest.raises(UserError, match=next(iter(keywords))):
        bf.BatchFormer(8, **keywords)


def test_a_group_may_be_one_process() -> None:
    assert bf.BatchFormer(8, scope="global", process_group=1).members.process_group == 1


def test_a_group_of_others_is_refused() -> None:
    with pytest.raises(UserError, match="does not belong to"):
        bf.BatchFormer(8, scope="global", process_group=torch.distributed.GroupMember.NON_GROUP_MEMBER)


def test_alone_the_weight_of_a_loss_is_one() -> None:
    assert mean_loss_weight(7) == 1.0
    with pytest.raises(UserError, match="batch=-1"):
        mean_loss_weight(-1)
