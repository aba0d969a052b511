"""Several processes find and score what one does."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scenes_of_patches import made_up, source, task

from eval.hummingbird import Protocol, evaluate

ROOT = Path(__file__).parents[1]
PROTOCOL = Protocol(bank_size=100, epochs=2, k=10)
MANY = {"bank_sizes": (60, None), "ks": (1, 4), "betas": (0.1,)}


def measured(protocol):
    """Results without their times, and the neighbours of this process's images."""
    train, val = made_up(images=11), made_up(images=5, seed=1, ignore_index=255)
    results, found = evaluate(protocol, task(protocol, ignore_index=255), source(train, 3), source(val, 2), **MANY)
    results.pop("seconds")
    patches = {i: found.image(place)[1].tolist() for place, i in enumerate(found.images)}
    return results, patches


def main(folder, distance):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(f"{folder}/store", world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results, patches = measured(replace(PROTOCOL, distance=distance))
    Path(folder, f"{rank}.json").write_text(json.dumps([results, patches]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("distance", ["cosine", pytest.param("l2", marks=pytest.mark.slow)])
def test_four_processes_find_and_score_what_one_does(distance, tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, __file__, str(tmp_path), distance]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, errors
    alone, patches = measured(replace(PROTOCOL, distance=distance))
    together = {}
    for rank in range(4):
        results, some = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results == json.loads(json.dumps(alone))
        together |= some
    assert together == {str(i): ids for i, ids in patches.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
