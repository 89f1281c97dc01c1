"""What the processes of `workers.py` do together; the tests that read the results say what they mean."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import batchformer as bf
from batchformer import parallel
from batchformer.errors import UserError, warn_once
from batchformer.nn import BatchEncoderLayer
from batchformer.parallel.members import exchange_sizes
from batchformer.parallel.relate import gather_rows

from .cases import CASES, DIM, Case, make_module, make_rows, outcome, own_rows
from .models import images_and_labels, make_classifier, make_token_model

Batches = tuple[int, ...]


def exactness(rank: int, batches: Batches) -> dict[str, Any]:
    """Every case: what came out, and the bytes that left, as counted by the package and as handed to torch."""
    results = {}
    for name, case in CASES.items():
        with parallel.count_traffic() as counted, handed_over(rank) as handed:
            result = outcome(case, "global", own_rows(rank, batches), sum(batches))
        results[name] = {"result": result, "counted": counted.activations, "sizes": counted.sizes, "handed": handed[0]}
    return results


@contextlib.contextmanager
def handed_over(rank: int) -> Any:
    """Bytes given to torch.distributed for other processes; the exchanges themselves are the real ones."""
    total = [0]
    to_all, gather, scatter = dist.all_to_all_single, parallel.relate._all_gather, parallel.relate._reduce_scatter

    def count_to_all(output: Tensor, given: Tensor, out=None, into=None, **keywords: Any) -> Any:
        if into is not None:
            total[0] += (sum(into) - into[rank]) * given.element_size()
        else:
            total[0] += given.numel() * given.element_size() * (dist.get_world_size() - 1) // dist.get_world_size()
        return to_all(output, given, out, into, **keywords)

    def count_gather(output: Tensor, given: Tensor, **keywords: Any) -> Any:
        total[0] += (output.numel() - given.numel()) * given.element_size()
        return gather(output, given, **keywords)

    def count_scatter(output: Tensor, given: Tensor, **keywords: Any) -> Any:
        total[0] += (given.numel() - output.numel()) * given.element_size()
        return scatter(output, given, **keywords)

    dist.all_to_all_single = count_to_all
    parallel.relate._all_gather, parallel.relate._reduce_scatter = count_gather, count_scatter
    try:
        yield total
    finally:
        dist.all_to_all_single = to_all
        parallel.relate._all_gather, parallel.relate._reduce_scatter = gather, scatter


def one_pass(rank: int, batches: Batches) -> dict[str, int]:
    """Equal batches of tokens in single precision: bytes forward, then backward."""
    module = bf.BatchFormerV2(DIM, 2, dropout=0.5, scope="global", streams="single")
    x = torch.randn(6, 12, DIM, requires_grad=True)
    with parallel.count_traffic() as forward:
        out = module(x)
    with parallel.count_traffic() as backward:
        out.sum().backward()
    assert torch.isfinite(out).all()
    return {"forward": forward.activations, "backward": backward.activations}


def inside_pairs(rank: int, batches: Batches) -> dict[str, Tensor]:
    """Processes 0 and 1 attend together, 2 and 3 together: by number, by group, in a copy, in a pickled copy."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(rank))
    results = {"x": x}
    for name, group in (("number", 2), ("group", pairs[rank // 2])):
        torch.manual_seed(0)
        module = bf.BatchFormer(DIM, 2, dropout=0.0, scope="global", process_group=group)
        results[name] = module.relate(x).detach()
        results[f"{name}-copy"] = copy.deepcopy(module).relate(x).detach()
        pickled = pickle.loads(pickle.dumps(module))
        try:
            results[f"{name}-pickled"] = pickled.relate(x).detach()
        except UserError as error:
            results[f"{name}-pickled"] = {"error": str(error)}
    return results


def group_destroyed(rank: int, batches: Batches) -> bool:
    """Whether anything still holds the group of a pair that was destroyed."""
    group = parallel.Members(2).group()
    assert group is not None
    held = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return held() is not None


def streams(rank: int, batches: Batches) -> dict[str, Tensor]:
    """One row on one process: with "split" it has no related row, and still must not keep the others waiting."""
    x = torch.randn(1 + 2 * rank, 4, DIM, generator=torch.Generator().manual_seed(rank))
    results = {"x": x}
    for kind in ("duplicate", "split", "single"):
        torch.manual_seed(0)
        module = bf.BatchFormerV2(DIM, 2, dropout=0.0, streams=kind, scope="global")
        results[kind] = module(x).detach()
        results[f"{kind}-carried"] = module(results[kind], opens=False).detach()
        with parallel.count_traffic() as traffic:
            assert module.eval()(x) is x
            module.relate(x)  # as pictures and mini-batch inference do: this process alone
        assert traffic.activations == traffic.sizes == 0
    return results


def disagreements(rank: int, batches: Batches) -> dict[str, str]:
    """What the last process does differently; every process must be told."""
    last = rank == len(batches) - 1
    plain = Case(4)

    def attempt(
        case: Case, dim: int = DIM, dtype: torch.dtype = torch.float64, valid: bool = False, grad=True, grid=None
    ) -> str:
        module = bf.BatchFormer(dim, case.heads, dim, 0.0, case.layers, case.norm, case.group_size, scope="global").to(
            dtype
        )
        x = torch.zeros(2, case.positions, dim, dtype=dtype)
        try:
            with torch.set_grad_enabled(grad):
                module.relate(x, torch.ones(2, case.positions, dtype=torch.bool) if valid else None, grid)
        except UserError as error:
            return str(error)
        return "nothing was said"

    def attempt_map(shape: tuple[int, int]) -> str:
        module = bf.BatchFormerV2(DIM, 2, scope="global", channels="first")
        try:
            module(torch.zeros(2, DIM, *shape), torch.ones(2, *shape, dtype=torch.bool))
        except UserError as error:
            return str(error)
        return "nothing was said"

    return {
        "positions": attempt(Case(5) if last else plain),
        "width": attempt(plain, dim=2 * DIM if last else DIM),
        "dtype": attempt(plain, dtype=torch.float32 if last else torch.float64),
        "kind of mask": attempt(plain, valid=last),
        "layers": attempt(Case(4, layers=2) if last else plain),
        "group_size": attempt(Case(4, group_size=2) if last else plain),
        "kind of gradient": attempt(plain, grad=not last),
        "height and width of maps": attempt_map((6, 2) if last else (2, 6)),
        "height and width of maps, flattened before": attempt(plain, grid=(4, 1) if last else (2, 2)),
        "": attempt(plain),  # and the group works as before
    }


def told_that_groups_are_apart(rank: int, batches: Batches) -> dict[str, list[str]]:
    """What is warned of, by group size and the rows of each process; each one twice."""
    heard = {}
    for size, rows in ((2, (4, 2)), (4, (4, 3)), (4, (3, 4)), (3, (2, 2)), (None, (2, 2)), (2, (2, 0))):
        module = bf.BatchFormer(DIM, 2, group_size=size, scope="global")
        warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                module.relate(torch.zeros(rows[rank], 4, DIM))
        heard[f"{size} of {rows}"] = [str(warning.message) for warning in caught]
    return heard


def transposed_rows(rank: int, batches: Batches) -> dict[str, Tensor]:
    """Gathered from memory that is not in the order of the rows, the gradient too: the longest batch is not padded."""
    total = make_rows(sum(batches), CASES["tokens"])[0]
    x = total[own_rows(rank, batches)].permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
    group = parallel.Members().group()
    gathered = gather_rows(x, exchange_sizes(x, None, group, 2, 1, None))
    gathered.transpose(0, 1).backward((rank + 1) * torch.ones(gathered.transpose(0, 1).shape, dtype=x.dtype))
    return {"all": gathered.detach(), "gradient": x.grad}


def no_positions(rank: int, batches: Batches) -> dict[str, Tensor]:
    module = bf.BatchFormerV2(DIM, 2, scope="global")
    return {"out": module(torch.zeros(2 + rank, 0, DIM)).detach()}


def ddp(rank: int, batches: Batches) -> dict[str, Tensor]:
    """Unequal batches, DDP's mean, a module before the classifier and one at the tokens."""
    results = {}
    batches = tuple(max(1, batch) for batch in batches)
    for name, make in (("features", make_classifier), ("tokens", make_token_model)):
        model = make("global")
        images, labels = images_and_labels(sum(batches))
        rows = own_rows(rank, batches)
        wrapped = DistributedDataParallel(model)  # which averages as long as it lives
        loss = bf.TwoStreamLoss(F.cross_entropy)(wrapped(images[rows]), labels[rows])
        (loss * parallel.mean_loss_weight(batches[rank])).backward()
        results[name] = {key: p.grad for key, p in model.named_parameters()}
    return results


def fsdp(rank: int, batches: Batches) -> dict[str, Tensor]:
    """FSDP2 on the CPU, each layer its own unit; four processes, three positions: one has none to work at."""
    model = make_token_model("global")
    for module in model.modules():
        if isinstance(module, BatchEncoderLayer):
            fully_shard(module)
    fully_shard(model)
    batches = tuple(max(1, batch) for batch in batches)
    images, labels = images_and_labels(sum(batches))
    rows = own_rows(rank, batches)
    loss = bf.TwoStreamLoss(F.cross_entropy)(model(images[rows]), labels[rows])
    (loss * parallel.mean_loss_weight(batches[rank])).backward()
    return {key: p.grad.full_tensor() for key, p in model.named_parameters()}


def weights(rank: int, batches: Batches) -> float:
    return parallel.mean_loss_weight(batches[rank])


def compiled(rank: int, batches: Batches) -> dict[str, Tensor]:
    """Under torch.compile (Dynamo and its graph breaks, eager kernels), with two batch sizes and with autocast."""
    results = {}
    for name, case in (("tokens", Case(5)), ("features", Case(1))):
        module = make_module(case, "global")
        run = torch.compile(module.relate, backend="eager")
        for total in (sum(batches), 2 * sum(batches)):
            x, _, weight = make_rows(total, case)
            rows = slice(total // 2 * rank, total // 2 * (rank + 1))
            module.zero_grad()
            out = run(x[rows])
            (out * weight[rows]).sum().backward()
            gradients = {key: p.grad.clone() for key, p in module.named_parameters()}
            results[f"{name}-{total}"] = {"out": out.detach(), **gradients}
    return results


def mixed_precision(rank: int, batches: Batches) -> dict[str, Tensor]:
    results = {}
    for name, case, dtype in (("tokens", Case(5), torch.bfloat16), ("features", Case(1), torch.float32)):
        module = make_module(case, "global").float()
        x = make_rows(sum(batches), case)[0][own_rows(rank, batches)].to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            out = module.relate(x)
        out.float().sum().backward()
        assert out.dtype == dtype
        assert all(torch.isfinite(p.grad).all() for p in module.parameters())
        results[name] = out.detach().float()
    return results


def checkpointed(rank: int, batches: Batches) -> dict[str, Tensor]:
    """Gradient checkpointing exchanges once more in the backward."""
    case = CASES["tokens"]
    module = make_module(case, "global")
    x, _, weight = make_rows(sum(batches), case)
    rows = own_rows(rank, batches)
    own = x[rows].requires_grad_()
    (checkpoint(module.relate, own, use_reentrant=False) * weight[rows]).sum().backward()
    return {"x": own.grad, **{key: p.grad for key, p in module.named_parameters()}}


def someone_dies(rank: int, batches: Batches) -> str | dict[str, str]:
    module = make_module(CASES["tokens"], "global")
    if rank == 1:
        os._exit(0)
    try:
        module.relate(torch.zeros(2, 4, DIM, dtype=torch.float64))
    except parallel.PeerLost as error:
        return {"error": str(error)}
    return "nothing was said"


def someone_stays_away(rank: int, batches: Batches) -> str | dict[str, str]:
    """The last process ran out of batches: the others are told after the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        module = bf.BatchFormer(DIM, 2, scope="global", process_group=group)
        try:
            module.relate(torch.zeros(2, 4, DIM))
        except parallel.PeerLost as error:
            store.set("told", "yes")
            return {"error": str(error)}
        return "nothing was said"
    store.wait(["told"], timedelta(seconds=40))
    return {}


def _named(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}


CHECKS = {
    2: _named(
        exactness, compiled, streams, ddp, told_that_groups_are_apart, no_positions, transposed_rows, someone_stays_away
    ),
    3: _named(exactness, mixed_precision, checkpointed, streams, disagreements, someone_dies),
    4: _named(exactness, one_pass, inside_pairs, group_destroyed, weights, ddp, fsdp),
}
