"""What a training run is: a frozen dataclass that refuses nonsense. A recipe is a function that returns one."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from timm_locat.data.protocols import PROTOCOLS, Protocol
from timm_locat.models import parse_kwargs
from timm_locat.train.course import check_when

__all__ = ["DataConfig", "TrainConfig"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model sees."""

    name: str = "fashion_mnist_mini"
    """A data set by name, the path of an image folder, of parquet files or of a `save_to_disk` folder, or a Hub id."""
    root: str | None = None
    """For a data set by name, the path of its files; fetched from the Hub when not given."""
    protocol: str = "flip"
    """Augmentation of the training images, by name (see timm_locat.data.PROTOCOLS)."""
    cutmix: float | None = None
    """Alpha of CutMix instead of the protocol's; 0 switches it off."""
    mixup: float | None = None
    """Alpha of mixup instead of the protocol's; 0 switches it off."""
    mix_prob: float | None = None
    """Probability that a batch is mixed, instead of the protocol's."""
    label_smoothing: float | None = None
    """Share of the target spread over all classes, instead of the protocol's."""
    permute_patches: int | None = None
    """Seed of one permutation of the patches that is applied to every image, in training and in testing, after
    augmentation. None leaves them where they are."""
    workers: int = 0
    """Processes per rank that read images; 0 reads in the training process, which is best for small sets."""
    in_memory: bool = True
    """Decode a set once and keep it in memory as 8-bit pixels where that takes less than 2 GiB."""
    streaming: bool = False
    """Read parquet files, a folder of `save_to_disk` or a data set of the Hub from start to end, and keep nothing."""
    shuffle_buffer: int = 10_000
    """Undecoded images that a streamed epoch is shuffled from, over all processes; they are held in memory."""
    updates_per_epoch: int | None = None
    """Optimizer steps that make an epoch, where a stream does not state its length or a part of it is enough."""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {self.protocol!r}")
        if self.workers < 0:
            raise ValueError(f"workers must be 0 or more, got {self.workers}")
        for name in ("shuffle_buffer", "updates_per_epoch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.augmentation()

    def augmentation(self) -> Protocol:
        """The protocol as it applies to this data set, with the values that were given instead of its own."""
        own = {name: getattr(self, name) for name in ("cutmix", "mixup", "mix_prob", "label_smoothing")}
        protocol = PROTOCOLS[self.protocol].for_data(self.name)
        return replace(protocol, **{name: value for name, value in own.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run: model, data, optimisation. Every field can be given on the command line."""

    model: str
    """Any timm model name, `local-dir:FOLDER` or `hf-hub:OWNER/NAME`."""
    data: DataConfig = field(default_factory=DataConfig)
    pretrained: bool = False
    """Start from the model's published weights; the head is new when the number of classes differs."""
    model_kwargs: str = "{}"
    """Further arguments of the model as a JSON object, such as '{"gaug": false}'."""
    img_size: int | None = None
    """Height and width in pixels; None takes the model's own."""
    epochs: int = 300
    global_batch_size: int = 1024
    """Images per optimizer step, over all processes and accumulation steps."""
    grad_accum_steps: int = 1
    """Forward and backward passes per optimizer step and process."""
    peak_lr: float = 1e-3
    """Learning rate at `global_batch_size` after warm-up; never rescaled behind your back."""
    min_lr: float = 1e-6
    """Learning rate at the last update."""
    warmup_epochs: float = 5
    """Epochs over which the learning rate rises linearly from `min_lr`."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How it falls afterwards."""
    weight_decay: float = 0.05
    """Of AdamW; biases, norms, tokens and position embeddings are left out."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW: decay of the running mean of gradients and of their squares."""
    clip_grad: float | None = 1.0
    """Largest norm of the gradient of one update; None does not clip."""
    layer_decay: float | None = None
    """Factor on the learning rate from each block to the one below it, for fine-tuning; None: the same for all."""
    ema_decay: float | None = None
    """Keep a moving average of the weights with this decay per update (less at the start); it is evaluated beside the
    model and exported into the folder `ema` of the run."""
    grad_checkpointing: bool = False
    """Recompute the blocks in the backward pass: less memory, about a third more time."""
    drop_path_rate: float = 0.0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast type. `accelerate launch --mixed_precision bf16` or `fp16` takes precedence."""
    eval_every: int = 1
    """Epochs between evaluations on the test split; the last epoch is always evaluated."""
    checkpoint_every: int = 1
    """Epochs between checkpoints."""
    compile: bool = False
    """Train through `torch.compile`. Numbers differ in the last digits from those without."""
    deterministic: bool = False
    """Take only algorithms that give the same bits each time, without TF32; slower on CUDA."""
    skip_broken: int = 0
    """Training images that may turn out unreadable before the run stops. Each is named in `broken.txt`; the next
    readable one of the set stands in for it."""
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Where to send the numbers of the run, besides `metrics.csv`."""
    push_to_hub: str | None = None
    """Publish the finished run as this `owner/name` on the Hugging Face Hub."""
    compare_bare: bool = False
    """Time forward and backward passes alone in between, and report the speed of the run as a share of theirs."""
    record_locality: str | None = None
    """Measure the attention of the model on test images after these updates: `log` (0, 1, 2, 4, ... and the last),
    `every:N`, or numbers such as `0,10,100`. Changes nothing about the run."""
    seed: int = 0
    show_batch: Path | None = None
    """Draw the first augmented batch, with labels and mixing weights, into this PNG, and leave without training."""
    out: Path | None = None
    """Run folder. None takes runs/RECIPE, or runs/RECIPE-2, -3, ... so that nothing is overwritten."""
    resume: Literal["never", "auto"] = "never"
    """`auto` continues the run in `out` (or in runs/RECIPE) from its last checkpoint, as if it had not stopped, and
    starts it where there is none. `never` refuses a folder that is not empty."""

    def __post_init__(self) -> None:
        parse_kwargs(self.model_kwargs, "--model-kwargs")
        check_when(self.record_locality)
        if self.record_locality is not None and self.data.streaming:
            raise ValueError("record_locality needs test images in any order, which a stream has not; leave one out")
        for name in ("epochs", "global_batch_size", "grad_accum_steps", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(f"warmup_epochs must be in [0, epochs={self.epochs}), got {self.warmup_epochs}")
        if not 0 < self.min_lr <= self.peak_lr:
            raise ValueError(f"min_lr must be in (0, peak_lr={self.peak_lr}], got {self.min_lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if self.skip_broken < 0:
            raise ValueError(f"skip_broken must be 0 or more, got {self.skip_broken}")
        if self.push_to_hub is not None and self.push_to_hub.count("/") != 1:
            raise ValueError(f"push_to_hub must read owner/name, got {self.push_to_hub!r}")
        for name in ("layer_decay", "ema_decay"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), or None, got {value}")
        if self.clip_grad is not None and self.clip_grad <= 0:
            raise ValueError(f"clip_grad must be positive, or None for no clipping, got {self.clip_grad}")
