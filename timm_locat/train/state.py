"""The state of a run as a checkpoint holds it, gathered from and handed back to whatever way the model is spread."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

__all__ = ["is_sharded", "load_states", "model_state", "optimizer_state"]


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds a part of the weights only (FSDP)."""
    return accelerator.distributed_type == DistributedType.FSDP


def model_state(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """All weights under their plain names; a sharded model's arrive on the CPU of the main process.

    Args:
        model: The model itself, without the wrappers of DDP and `torch.compile`.
    """
    if is_sharded(accelerator):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return model.state_dict()


def optimizer_state(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of the optimizer; a sharded one's under the names of the parameters, on the main process.

    Args:
        model: The model itself.
        optimizer: As `Accelerator.prepare` returned it.
    """
    if is_sharded(accelerator):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(model, optimizer.optimizer, options=options)
    return optimizer.state_dict()


def load_states(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Hand back what `model_state` and `optimizer_state` returned.

    Args:
        states: Of the model, then of the optimizer; every process has read them.
    """
    if is_sharded(accelerator):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_model_state_dict(model, states[0], options=options)
        set_optimizer_state_dict(model, optimizer.optimizer, states[1], options=options)
        return
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
