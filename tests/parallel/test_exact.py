"""Promise 6: N processes with scope="global" agree with one process that has the whole batch, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import batchformer as bf

from .cases import BATCHES, CASES, DIM, Case, make_module, make_rows, outcome
from .models import images_and_labels, make_classifier, make_token_model

EXACT = {"atol": 1e-12, "rtol": 1e-10}  # float64; the promise is 1e-6


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("processes", BATCHES)
def test_outputs_and_summed_gradients_are_those_of_one_process(together, processes: int, name: str) -> None:
    expected = outcome(CASES[name], "local", slice(None), sum(BATCHES[processes]))
    ours = [rank["exactness"][name]["result"] for rank in together[processes]]
    for key in ("out", "x"):
        torch.testing.assert_close(torch.cat([result[key] for result in ours]), expected[key], **EXACT)
    for key in expected.keys() - {"out", "x"}:
        torch.testing.assert_close(sum(result[key] for result in ours), expected[key], **EXACT)


def test_rows_are_gathered_whatever_their_order_in_memory(together) -> None:
    expected = make_rows(sum(BATCHES[2]), CASES["tokens"])[0]
    for rank in together[2]:
        assert torch.equal(rank["transposed_rows"]["all"], expected)
        assert rank["transposed_rows"]["gradient"].unique().tolist() == [1 + 2]


def test_the_reference_would_notice_a_process_that_attends_alone() -> None:
    case = CASES["tokens"]
    whole = outcome(case, "local", slice(None), 8)["out"]
    alone = outcome(case, "local", slice(0, 3), 8)["out"]
    assert (whole[:3] - alone).abs().max() > 1e-2


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("model", ["features", "tokens"])
def test_under_ddp_weighted_losses_give_the_gradient_of_the_mean_over_all_samples(together, processes, model) -> None:
    expected = _mean_gradients(model, processes)
    for rank in together[processes]:
        for key, gradient in rank["ddp"][model].items():
            torch.testing.assert_close(gradient, expected[key], **EXACT)


def test_under_fsdp_too_with_more_processes_than_positions(together) -> None:
    expected = _mean_gradients("tokens", 4)
    for rank in together[4]:
        assert rank["fsdp"].keys() == expected.keys()
        for key, gradient in rank["fsdp"].items():
            torch.testing.assert_close(gradient, expected[key], **EXACT)


def _mean_gradients(kind: str, processes: int) -> dict[str, Tensor]:
    model = {"features": make_classifier, "tokens": make_token_model}[kind]("local")
    images, labels = images_and_labels(sum(max(1, batch) for batch in BATCHES[processes]))
    bf.TwoStreamLoss(F.cross_entropy)(model(images), labels).backward()
    return {key: p.grad for key, p in model.named_parameters()}


def test_the_weight_of_a_mean_loss_is_the_share_of_the_samples(together) -> None:
    assert [rank["weights"] for rank in together[4]] == [4 * batch / 11 for batch in BATCHES[4]]


def test_processes_of_a_group_attend_among_themselves(together) -> None:
    ranks = [rank["inside_pairs"] for rank in together[4]]
    torch.manual_seed(0)
    module = bf.BatchFormer(DIM, 2, dropout=0.0)
    for pair in (ranks[:2], ranks[2:]):
        expected = module.relate(torch.cat([rank["x"] for rank in pair]))
        for way in ("number", "number-copy", "number-pickled", "group", "group-copy"):
            torch.testing.assert_close(torch.cat([rank[way] for rank in pair]), expected, atol=1e-6, rtol=1e-5)
    assert "did not travel with the pickled copy" in ranks[0]["group-pickled"]["error"]


def test_a_destroyed_group_is_let_go_of(together) -> None:
    assert [rank["group_destroyed"] for rank in together[4]] == [False] * 4


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
def test_related_rows_see_the_related_rows_of_all_and_plain_rows_stay(together, processes, streams) -> None:
    ranks = [rank["streams"] for rank in together[processes]]
    inputs = [rank["x"] for rank in ranks]
    plain = {"duplicate": [len(x) for x in inputs], "split": [(len(x) + 1) // 2 for x in inputs]}
    plain_counts = plain.get(streams, [0] * processes)
    sources = [x if streams == "duplicate" else x[count:] for x, count in zip(inputs, plain_counts, strict=True)]
    torch.manual_seed(0)
    module = bf.BatchFormer(DIM, 2, dropout=0.0)
    once = module.relate(torch.cat(sources))
    for key, related in ((streams, once), (f"{streams}-carried", module.relate(once))):
        pieces = [rank[key][count:] for rank, count in zip(ranks, plain_counts, strict=True)]
        torch.testing.assert_close(torch.cat(pieces), related, atol=1e-5, rtol=1e-5)
        for rank, x, count in zip(ranks, inputs, plain_counts, strict=True):
            assert torch.equal(rank[key][:count], x[:count])


@pytest.mark.parametrize("name", ["tokens", "features"])
def test_compiled_it_computes_the_same_for_every_batch_size(together, name) -> None:
    case = Case(5) if name == "tokens" else Case(1)
    for total in (8, 16):
        ours = [rank["compiled"][f"{name}-{total}"] for rank in together[2]]
        module = make_module(case, "local")
        x, _, weights = make_rows(total, case)
        out = module.relate(x)
        (out * weights).sum().backward()
        torch.testing.assert_close(torch.cat([result["out"] for result in ours]), out, **EXACT)
        for key, parameter in module.named_parameters():
            torch.testing.assert_close(sum(result[key] for result in ours), parameter.grad, **EXACT)


@pytest.mark.parametrize("name", ["tokens", "features"])
def test_under_autocast_it_is_as_near_as_half_precision_is(together, name) -> None:
    case = Case(5) if name == "tokens" else Case(1)
    x = make_rows(sum(BATCHES[3]), case)[0]
    expected = make_module(case, "local").relate(x)
    ours = torch.cat([rank["mixed_precision"][name] for rank in together[3]])
    assert (ours - expected).abs().max() < 0.1


def test_gradient_checkpointing_exchanges_again_and_gives_the_same_gradients(together) -> None:
    expected = outcome(CASES["tokens"], "local", slice(None), sum(BATCHES[3]))
    ours = [rank["checkpointed"] for rank in together[3]]
    torch.testing.assert_close(torch.cat([result["x"] for result in ours]), expected["x"], **EXACT)
    for key in ours[0].keys() - {"x"}:
        torch.testing.assert_close(sum(result[key] for result in ours), expected[key], **EXACT)
