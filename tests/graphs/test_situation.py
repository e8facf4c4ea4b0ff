"""Who is asking."""

import pytest
import torch

from sdm_compile.graphs import Situation, current_situation


def test_without_a_gpu() -> None:
    assert current_situation(torch.device("cpu")) is Situation.EAGER
    assert current_situation(torch.device("meta")) is Situation.TRACING


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    assert current_situation(device) is Situation.EAGER
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert current_situation(device) is Situation.CAPTURING
    assert current_situation(device) is Situation.EAGER
