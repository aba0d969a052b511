"""Fixtures that several test files use."""

import pytest
import timm
import torch

import timm_locat  # noqa: F401  registers the models


@pytest.fixture(autouse=True)
def _restore_global_switches():
    """Some tests switch timm's fused attention off; none may leave it so."""
    fused = timm.layers.use_fused_attn()
    threads = torch.get_num_threads()
    yield
    timm.layers.set_fused_attn(bool(fused))
    torch.set_num_threads(threads)
