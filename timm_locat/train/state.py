"""The state of a run as a checkpoint holds it, gathered from and handed back to whatever way the model is spread."""

import os
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

from timm_locat.errors import UserError
from timm_locat.train.config import TrainConfig

__all__ = ["check_sharding", "is_sharded", "load_states", "model_state", "name_blocks", "optimizer_state"]

NEEDS_ALL_WEIGHTS = ("ema_decay", "record_locality", "compare_bare")
"""Fields of a run that need the whole model in each process."""


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds a part of the weights only (FSDP)."""
    return accelerator.distributed_type == DistributedType.FSDP


def check_sharding(accelerator: Accelerator, config: TrainConfig) -> None:
    """Refuse what does not go together with sharding, and sharding where accelerate would leave it out in silence.

    Raises:
        UserError: FSDP was asked for on a CPU, or in its first version, or with a setting that needs all weights.
    """
    if not is_sharded(accelerator):
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            raise UserError(
                f"FSDP was asked for, and accelerate shards on accelerators only, not on {accelerator.device.type}; "
                "use a launch file without FSDP"
            )
        return
    if not accelerator.is_fsdp2:
        raise UserError("FSDP is supported in its second version: put fsdp_version: 2 into the launch file")
    if asked := [name for name in NEEDS_ALL_WEIGHTS if getattr(config, name)]:
        raise UserError(
            f"{' and '.join(asked)} need all weights in each process, and FSDP spreads them; leave out, or use DDP"
        )


def name_blocks(model: nn.Module) -> None:
    """Tell accelerate which modules are sharded as a unit, as transformers' models do: the members of `blocks`.

    A launch file that says it itself takes precedence. A model without `blocks` is one unit.
    """
    kinds = {
        type(block).__name__
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "blocks"
        for block in module.children()
    }
    model._no_split_modules = sorted(kinds)


def model_state(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """All weights under their plain names; a sharded model's arrive on the CPU of the main process.

    Args:
        model: The model itself, without the wrappers of DDP and `torch.compile`.
    """
    if is_sharded(accelerator):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return model.state_dict()


def optimizer_state(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of the optimizer as its `state_dict` has it; a sharded one's arrives on the main process.

    Args:
        model: The model itself.
        optimizer: As `Accelerator.prepare` returned it.
    """
    if not is_sharded(accelerator):
        return optimizer.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)
    number = {name: i for i, name in enumerate(parameter_names(model, optimizer))}
    return _renamed(state, number) if state else state


def load_states(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Hand back what `model_state` and `optimizer_state` returned, however the model was spread then.

    Args:
        states: Of the model, then of the optimizer; every process has read them.
    """
    if not is_sharded(accelerator):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_model_state_dict(model, states[0], options=options)
    name = dict(enumerate(parameter_names(model, optimizer)))
    set_optimizer_state_dict(model, optimizer.optimizer, _renamed(states[1], name), options=options)


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the parameters in the order of the optimizer, which numbers them in its `state_dict`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _renamed(state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """The state of an optimizer under other keys."""
    return {
        "state": {new[key]: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [new[key] for key in group["params"]]} for group in state["param_groups"]],
    }
