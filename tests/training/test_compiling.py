"""Compiling one network after the other, as a comparison over many seeds does."""

import torch
from torch import nn

import batchformer as bf
from batchformer.training.compiling import compile_in_place


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)


def test_the_tenth_network_is_compiled_too():
    torch._dynamo.reset()
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    before = torch._dynamo.config.recompile_limit
    try:
        for _ in range(10):
            net = Net().train()
            bf.attach(net, before="fc", heads=1)
            compile_in_place(net, backend=backend)
            assert net(torch.randn(2, 4)).shape == (4, 3)
    finally:
        torch._dynamo.config.recompile_limit = before
        torch._dynamo.reset()
    assert len(made) == 10
