"""The cost model against the bytes that gloo was given, and the rule that follows from it."""

from __future__ import annotations

import pytest

from batchformer.errors import UserError
from batchformer.parallel import Links, bytes_sent, cheapest_exchange, step_cost
from batchformer.parallel.members import SIZES_BYTES

from .cases import BATCHES, CASES, DIM


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("processes", BATCHES)
def test_the_model_gives_the_bytes_that_were_sent(together, processes: int, name: str) -> None:
    case, batches = CASES[name], BATCHES[processes]
    exchange = case.exchange or ("gather" if case.positions == 1 else "positions")
    shape = {"heads": case.heads, "layers": case.layers, "itemsize": 8, "masked": case.masked}
    forward = bytes_sent(exchange, batches, case.positions, DIM, **shape)
    backward = bytes_sent(exchange, batches, case.positions, DIM, **shape, backward=True)
    for rank, result in enumerate(together[processes]):
        seen = result["exactness"][name]
        assert seen["counted"] == forward[rank] + backward[rank]
        assert seen["sizes"] == (processes - 1) * SIZES_BYTES
        assert seen["handed"] == seen["counted"] + seen["sizes"]


def test_tokens_cost_one_activation_each_way(together) -> None:
    activation = 6 * 12 * DIM * 4
    for rank in together[4]:  # a quarter stays at home
        assert rank["one_pass"]["forward"] == 2 * activation * 3 // 4
        assert rank["one_pass"]["backward"] == 2 * activation * 3 // 4


@pytest.mark.parametrize("exchange", ["positions", "gather", "heads"])
def test_the_cost_of_a_step_is_the_bytes_sent_where_work_divides_evenly(exchange) -> None:
    cost = step_cost(exchange, 4, 6, 12, DIM, heads=2, layers=2, itemsize=4)
    shape = {"heads": 2, "layers": 2, "itemsize": 4}
    sent = (
        bytes_sent(exchange, [6] * 4, 12, DIM, **shape),
        bytes_sent(exchange, [6] * 4, 12, DIM, backward=True, **shape),
    )
    assert cost.bytes == sent[0][0] + sent[1][0]
    assert cost.network_bytes == 0


def test_trading_positions_costs_the_same_on_a_thousand_processes_and_gathering_does_not() -> None:
    def bytes_of(exchange: str, processes: int) -> int:
        return step_cost(exchange, processes, 32, 4096, 256).bytes

    assert bytes_of("positions", 1024) < 1.2 * bytes_of("positions", 8)
    assert bytes_of("gather", 1024) > 100 * bytes_of("gather", 8)


def test_the_rule_takes_the_faster_way() -> None:
    assert cheapest_exchange(8, 128, 197, 384, heads=6) == "positions"
    assert cheapest_exchange(4096, 128, 197, 384, heads=6) == "heads"  # most processes would have no position
    assert cheapest_exchange(8, 128, 1, 2048) == "gather"
    assert cheapest_exchange(8, 8192, 1, 2048, heads=8) == "heads"
    assert cheapest_exchange(64, 8192, 1, 2048, heads=8) == "gather"  # rows enter a node once


def test_time_is_that_of_the_slower_link() -> None:
    cost = step_cost("positions", 16, 128, 196, 384)
    assert cost.network_seconds > cost.nvlink_seconds > 0
    assert cost.seconds == pytest.approx(cost.network_seconds + 4 * 20e-6)
    assert step_cost("positions", 1, 128, 196, 384).seconds == 0


LINKS = Links(node=2, nvlink=100.0, network=10.0, latency=0.5)
# Four processes on two nodes, 3 rows each, 4 positions of width 8 in 2 bytes, 2 heads, 2 layers. Bytes of an exchange
# to each other process; a process has one neighbour on its node and two on the other.
BY_HAND = {
    "positions": ([3 * 1 * 8 * 2] * 4, 1, 1),  # rows x its position x width: there and back, forward and backward
    "heads": ([3 * 2 * 12 * 2, 3 * 2 * 4 * 2] * 4, 1, 1),  # two of 8 pairs, 3 x 4 wide there, 4 back, twice a layer
    "gather": ([3 * 4 * 8 * 2] * 4, 3, 2),  # all positions; a ring passes on 3 pieces, and both ports share the network
}


@pytest.mark.parametrize("exchange", BY_HAND)
def test_the_numbers_of_a_step_are_those_counted_by_hand(exchange) -> None:
    pieces, near, ports = BY_HAND[exchange]
    cost = step_cost(exchange, 4, 3, 4, 8, heads=2, layers=2, itemsize=2, links=LINKS)
    assert (cost.exchange, cost.processes) == (exchange, 4)
    assert cost.bytes == 3 * sum(pieces)
    assert cost.network_bytes == 2 * sum(pieces) / ports
    assert cost.nvlink_seconds == pytest.approx(near * sum(pieces) / 100)
    assert cost.network_seconds == pytest.approx(2 * sum(pieces) / ports / 10)
    assert cost.seconds == pytest.approx(sum(0.5 + 2 * piece / ports / 10 for piece in pieces))
    inside = step_cost(exchange, 2, 3, 4, 8, heads=2, layers=2, itemsize=2, links=LINKS)
    assert (inside.network_bytes, inside.network_seconds) == (0, 0)
    assert inside.seconds == pytest.approx(inside.nvlink_seconds + len(pieces) * 0.5)


def test_the_default_links_are_eight_gpus_on_nvlink_4_and_a_400_gigabit_port_each() -> None:
    gigabit = 1e9 / 8
    assert Links() == Links(node=8, nvlink=900e9 / 2, network=400 * gigabit, latency=20e-6)


def test_a_cost_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="exchange='all'"):
        step_cost("all", 8, 1, 1, 8)
    with pytest.raises(UserError, match="one process"):
        step_cost("gather", 0, 1, 1, 8)
