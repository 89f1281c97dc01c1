"""Momentum encoder and queue: against their definitions, in place, and over two processes as over one."""

import copy
import datetime
import os
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn

from batchformer.data import DataInfo
from batchformer.data.loading.order import generator
from batchformer.errors import UserError
from batchformer.tasks import LongTailed, MoCo
from batchformer.training.momentum import MomentumEncoder, Queue, of_all_processes, own_rows

from ..processes import run_in_processes


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def test_the_momentum_encoder_follows_by_its_formula():
    source = network()
    encoder = MomentumEncoder(source, 0.9)
    expected = [p.detach().clone() for p in source.parameters()]
    for momentum in (0.9, 0.9, 0.5):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(torch.randn_like(p))
        encoder.set_momentum(momentum)
        encoder.follow(source)
        pairs = zip(expected, source.parameters(), strict=True)
        expected = [momentum * k + (1 - momentum) * q.detach() for k, q in pairs]
        for own, value in zip(encoder.encoder.parameters(), expected, strict=True):
            torch.testing.assert_close(own, value)


def test_it_changes_in_place_has_no_gradients_and_its_own_batch_norm():
    source = network()
    encoder, before = MomentumEncoder(source), [p.clone() for p in source.parameters()]
    places = [p.data_ptr() for p in encoder.encoder.parameters()]
    out = encoder(torch.randn(8, 4))
    encoder.follow(source)
    assert not out.requires_grad
    assert not any(p.requires_grad for p in encoder.parameters())
    assert [p.data_ptr() for p in encoder.encoder.parameters()] == places
    assert source[1].running_mean.eq(0).all()
    assert encoder.encoder[1].running_mean.ne(0).any()
    assert all(torch.equal(p, q) for p, q in zip(source.parameters(), before, strict=True))
    encoder.copy_from(source)
    assert encoder.encoder[1].running_mean.eq(0).all()


def test_the_source_may_have_further_parameters():
    source = network()
    part = copy.deepcopy(source)
    part[3] = nn.Identity()
    encoder = MomentumEncoder(part, 0.0)
    with torch.no_grad():
        source[0].weight.fill_(7.0)
    encoder.follow(source)
    assert encoder.encoder[0].weight.eq(7.0).all()


@pytest.mark.parametrize("pushed", [2, 4, 12])
def test_the_queue_is_a_list_of_the_last_keys(pushed):
    torch.manual_seed(0)
    queue = Queue(12, 3, classes=5)
    keys, labels = (deque(each.clone().unbind(), maxlen=12) for each in (queue.keys, queue.labels))
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(12))
    assert queue.labels.max() < 5
    for _ in range(9):
        new, new_labels = torch.randn(pushed, 3), torch.randint(5, (pushed,))
        queue.push(new, new_labels)
        keys.extend(new.unbind())
        labels.extend(new_labels.unbind())
        oldest = int(queue.position)
        assert torch.equal(queue.keys.roll(-oldest, 0), torch.stack(list(keys)))
        assert torch.equal(queue.labels.roll(-oldest), torch.stack(list(labels)))


def test_a_queue_is_changed_in_place_and_loads_from_its_state():
    queue, other = Queue(8, 2, classes=3), Queue(8, 2, classes=3)
    places = [buffer.data_ptr() for buffer in queue.buffers()]
    queue.push(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    assert [buffer.data_ptr() for buffer in queue.buffers()] == places
    other.load_state_dict(queue.state_dict())
    for one in (queue, other):
        one.push(torch.zeros(4, 2), torch.ones(4, dtype=torch.int64))
    assert torch.equal(queue.keys, other.keys)
    assert queue.keys[:4].eq(1).all()
    assert list(Queue(8, 2).state_dict()) == ["keys", "position"]


@pytest.mark.parametrize(("size", "said"), [(10, "choose 8 or 12"), (3, "choose 4")])
def test_a_queue_that_does_not_divide_is_refused(size, said):
    with pytest.raises(UserError, match=rf"a queue of {size} is no multiple of the 4 keys that a step adds .*{said}"):
        Queue(size, 2).push(torch.zeros(4, 2))


# two processes

INFO = DataInfo(classes=list("abc"), class_counts=[9, 5, 2])
BATCH, STEPS = 8, 4


def made_task(scope="local"):
    options = {"algorithm": "paco", "paco": {"queue": 16, "dim": 4, "temperature": 0.5, "momentum": 0.5}}
    task = LongTailed("resnet20", {"widths": [4, 8]}, batchformer={"dropout": 0.0, "scope": scope}, **options)
    task.construct(INFO)
    for module in task.train().modules():  # statistics of a process are not those of both
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.eval()
    return task


def trained(process=0, processes=1):
    """State and losses after some steps, each process on its share of the batch, gradients averaged as DDP does."""
    task, losses = made_task("global" if processes > 1 else "local"), []
    weights = [p for p in task.parameters() if p.requires_grad]
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = {"views": list(torch.randn(2, BATCH, 3, 8, 8, generator=draw)),
                 "labels": torch.randint(3, (BATCH,), generator=draw)}  # fmt: skip
        own = slice(process, None, processes)
        batch = {"views": [view[own] for view in batch["views"]], "labels": batch["labels"][own]}
        loss = task.step(batch)["loss"]
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if processes > 1:
                    dist.all_reduce(gradient)
                weight.sub_(gradient / processes, alpha=0.1)
        losses.append(loss.item())
    return task.state_dict(), losses


def made_moco(shuffle):
    contrast = {"version": "v2", "hidden_dim": 8, "out_dim": 4, "queue": 64, "shuffle": shuffle}
    task = MoCo("resnet20", {"widths": [4, 8]}, batchformer={"heads": 2, "dropout": 0.0}, contrast=contrast)
    task.construct(INFO)
    task._step_numbers = (0, 5, 0)
    return task.train()


def moco_images():
    return torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def work(process, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=process, world_size=2, timeout=patience)
    rows = torch.tensor([[10.0 * process], [10.0 * process + 1]], requires_grad=True)
    together = of_all_processes(rows)
    (together.squeeze(1) * torch.arange(1.0, 5.0)).sum().backward()
    gathered = together.detach(), own_rows(2, rows.device), rows.grad, of_all_processes(rows.detach().long())
    keys = [made_moco(shuffle)._shuffled_keys_of(moco_images()[process::2]) for shuffle in (True, False)]
    torch.save([gathered, trained(process, 2), keys], f"{folder}/{process}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(work, 2, folder)
    return [torch.load(folder / f"{process}.pt") for process in range(2)]


def test_rows_are_gathered_in_the_order_of_one_process_and_gradients_are_summed(two_processes):
    for process, ((together, own, gradient, whole), *_) in enumerate(two_processes):
        assert together.flatten().tolist() == [0.0, 10.0, 1.0, 11.0]
        assert whole.flatten().tolist() == [0, 10, 1, 11]
        assert own.tolist() == [process, process + 2]
        assert gradient.flatten().tolist() == [2.0 * (process + 1), 2.0 * (process + 3)]  # of both losses


def test_two_processes_train_as_one_with_the_whole_batch(two_processes):
    expected, losses = trained()
    states, of_each = zip(*(each[1] for each in two_processes), strict=True)
    assert torch.tensor(of_each).mean(0).tolist() == pytest.approx(losses, rel=1e-5)
    for state in states:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)
    moved = expected["algorithm.key_net.encoder.conv1.weight"] - made_task().net.conv1.weight
    assert moved.abs().max() > 1e-4  # the encoders have learnt something in these steps


def test_keys_of_shuffled_images_are_normalised_with_images_of_both_processes(two_processes):
    """Each process has half of a random order of all images as its batch of keys; then every key goes back."""
    images, order = moco_images(), generator(0, 5, 0, "shuffled keys").permutation(BATCH)
    plain, related = torch.empty(2, BATCH, 4).unbind()
    for process in range(2):
        taken = order[process::2]
        plain[taken], related[taken] = made_moco(True).keys_of(images[taken]).chunk(2)
    for process, (_, _, (shuffled, own)) in enumerate(two_processes):
        expected = torch.cat([plain[process::2], related[process::2]])
        torch.testing.assert_close(shuffled, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own, made_moco(False).keys_of(images[process::2]), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(shuffled, own, atol=1e-2)
