"""Fixtures that several test files use."""

import os
from dataclasses import replace

import pytest
import timm
import torch

import timm_locat  # noqa: F401  registers the models
from timm_locat.data import DATASETS

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Processes that each take every core wait for each other; what they start inherits the variable.
    share = max(1, (os.cpu_count() or 1) // workers)
    os.environ["OMP_NUM_THREADS"] = str(share)
    torch.set_num_threads(share)


@pytest.fixture(autouse=True)
def _restore_global_switches():
    """Some tests switch timm's fused attention off; none may leave it so."""
    fused = timm.layers.use_fused_attn()
    threads = torch.get_num_threads()
    yield
    timm.layers.set_fused_attn(bool(fused))
    torch.set_num_threads(threads)


@pytest.fixture
def small(monkeypatch):
    """A function that lets a data set known by name have as few images and classes as a fixture of it has."""

    def let(name, num_classes=None, **sizes):
        entry = DATASETS[name]
        entry = replace(entry, sizes={**entry.sizes, **sizes}, num_classes=num_classes or entry.num_classes)
        monkeypatch.setitem(DATASETS, name, entry)

    return let
