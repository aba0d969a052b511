"""What a run of DINO is: the configuration of any training run, and what DINO adds to it."""

from dataclasses import dataclass, field

from timm_locat.train.config import DataConfig, TrainConfig

__all__ = ["DinoConfig"]

UNUSED = {
    "ema_decay": "the teacher is the moving average",
    "layer_decay": "there is no pretrained bottom to spare",
    "compare_bare": "its passes are not those of a classifier",
    "push_to_hub": "push the run folder afterwards with `python -m timm_locat.hub push`",
}
"""Settings of a classifier's run that DINO refuses, and why."""


@dataclass(frozen=True, kw_only=True)
class DinoConfig(TrainConfig):
    """One run of DINO. Where nothing is said, defaults are those of the paper's code for ViT-S/16."""

    data: DataConfig = field(default_factory=lambda: DataConfig(protocol="none"))
    """The images; labels are only used to measure. `protocol` stays `none`: the crops below are the augmentation."""
    epochs: int = 100
    peak_lr: float = 2e-3
    """At `global_batch_size` after warm-up: the paper's 5e-4 times batch / 256."""
    min_lr: float = 1e-6
    warmup_epochs: float = 10
    """Epochs over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.04
    """Of AdamW, at the start; biases, norms, tokens and position embeddings are left out."""
    weight_decay_end: float = 0.4
    """At the end; in between a cosine."""
    clip_grad: float | None = 3.0
    """Largest norm of the gradient of each parameter by itself, as in the paper's code; None does not clip."""
    drop_path_rate: float = 0.1
    """Of the student; the teacher has none."""
    local_crops: int = 8
    """Small crops per image, for the student alone, besides the two global ones that both see."""
    local_size: int = 96
    """Side of the small crops in pixels, a multiple of the patch; global ones have the model's own size."""
    global_area: tuple[float, float] = (0.4, 1.0)
    """Smallest and largest share of the image's area in a global crop."""
    local_area: tuple[float, float] = (0.05, 0.4)
    """The same for a small crop."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    color_jitter: float = 0.8
    """Probability of a change in brightness, contrast (0.4 each), saturation (0.2) and hue (0.1)."""
    grayscale: float = 0.2
    """Probability that a crop loses its colour."""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """Probability of blur in the first global crop, the second, and the small ones."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest radius of it in pixels."""
    solarize: float = 0.2
    """Probability that the second global crop has its bright values inverted."""
    out_dim: int = 65536
    """Outputs that the head gives, and that the teacher sorts images by."""
    hidden_dim: int = 2048
    """Width of the head's hidden layers."""
    bottleneck_dim: int = 256
    """Width before its last layer."""
    norm_last_layer: bool = True
    """Keep the length of the last layer's weights at 1."""
    freeze_last_layer_epochs: int = 1
    """Epochs in which the last layer stays as it is."""
    student_temp: float = 0.1
    teacher_temp: float = 0.04
    """After its warm-up."""
    warmup_teacher_temp: float = 0.04
    """At the start."""
    teacher_temp_warmup_epochs: int = 0
    """Epochs over which the temperature goes linearly from one to the other."""
    teacher_momentum: float = 0.996
    """Share of the teacher that an update keeps, at the start; from there a cosine up to 1."""
    center_momentum: float = 0.9
    """Share of the centre of the teacher's outputs that an update keeps."""
    knn_neighbours: int = 20
    """Of the k-NN classifier on the teacher's features that measures the run, with weights exp(cosine / 0.07)."""
    knn_images: int = 50_000
    """Training images that it chooses neighbours from, spread evenly over the split; all where there are fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in UNUSED.items():
            if getattr(self, name):
                raise ValueError(f"{name} is not for DINO: {why}; leave it out")
        data = self.data
        if data.protocol != "none" or data.cutmix or data.mixup or data.label_smoothing:
            raise ValueError("DINO has crops of its own and no labels: data.protocol must be none, without mixing")
        if data.streaming:
            raise ValueError("DINO is measured on training images in any order, which a stream has not; leave it out")
        if data.permute_patches is not None:
            raise ValueError("permute_patches is not for DINO, whose crops have several sizes; leave it out")
        if self.schedule != "cosine":
            raise ValueError(f"schedule must be cosine for DINO, got {self.schedule!r}")
        for name in ("out_dim", "hidden_dim", "bottleneck_dim", "local_size", "knn_neighbours", "knn_images"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("local_crops", "freeze_last_layer_epochs", "teacher_temp_warmup_epochs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("student_temp", "teacher_temp", "warmup_teacher_temp"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("teacher_momentum", "center_momentum", "flip", "color_jitter", "grayscale", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not all(0 <= share <= 1 for share in self.blur):
            raise ValueError(f"blur must be three probabilities in [0, 1], got {self.blur}")
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(f"blur_sigma must be two radii above 0 in order, got {self.blur_sigma}")
        for name in ("global_area", "local_area"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ValueError(f"{name} must be two shares of the image in (0, 1] in order, got {(low, high)}")
