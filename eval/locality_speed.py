"""What recording locality costs: time and memory of `record` against a plain forward of the same model.

As in `eval.speed`, every round times three runs back to back in changing order: the recorder with all measures of all
layers, a plain forward with fused attention, and a second plain one, whose distance from the first is the noise.
"""

import functools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn

from eval import speed
from eval.memory import cpu_peak, cuda_peak
from eval.paired import judge, noise, paired_ratios, spread
from timm_locat.errors import UserError
from timm_locat.locality import record
from timm_locat.models import create_model
from timm_locat.record import write_record

PROTOCOL = "locality-speed/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Time and memory of recording all measures of locality in all layers, against a plain fused forward."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = "vit_tiny_patch16_224"
    """timm name of the model."""
    img_size: int = 224
    """Image side in pixels."""
    batch: int = 8
    """Images per pass."""
    pairs: int = 15
    """Rounds, each of which gives one ratio; at least 3."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads of torch; torch's own choice when left out."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    bar: float = 1.25
    """Largest ratio of times allowed, before the noise is added to it."""
    memory_bar: float = 1.2
    """Largest ratio of peak memories allowed."""
    strict: bool = False
    """Leave with status 1 if a bar is missed."""
    seed: int = 0
    """Seed of weights, images and order."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of the record; a name made of the settings, in ./results, when left out."""

    def __post_init__(self) -> None:
        self.timing()

    def timing(self) -> speed.Config:
        """The settings that `eval.speed` has as well, checked there."""
        shared = ("batch", "pairs", "threads", "device", "seed", "bar")
        values = {name: getattr(self, name) for name in shared}
        return speed.Config(model=self.model, against=self.model, img_size=(self.img_size,), **values)


def build(config: Config) -> tuple[nn.Module, Tensor]:
    """The model in eval mode and a batch of random images, the same every time."""
    torch.manual_seed(config.seed)
    model = create_model(config.model, img_size=config.timing().size).to(config.device).eval()
    images = torch.randn(config.batch, 3, *config.timing().size, generator=torch.Generator().manual_seed(config.seed))
    return model, images.to(config.device)


def recording(config: Config) -> speed.Step:
    """One pass that measures everything."""
    model, images = build(config)
    return lambda: record(model, [images])


def plain(config: Config) -> speed.Step:
    """One pass that measures nothing."""
    model, images = build(config)

    def step() -> Tensor:
        with torch.no_grad():
            return model(images)

    return step


def in_child(make: Any, config: Config) -> speed.Step:
    """A step for a fresh process, which starts with settings of its own."""
    speed.apply_settings(config.timing())
    return make(config)


def measure(config: Config) -> dict[str, Any]:
    """The results of a record."""
    timing = config.timing()
    steps = {"model": recording(config), "against": plain(config), "again": plain(config)}
    timings = speed.time_rounds(steps, timing)
    samples = timings.samples
    memory = {}
    for name, make in (("recorder", recording), ("plain", plain)):
        if config.device == "cuda":
            memory[name] = cuda_peak(make(config))
        else:
            memory[name] = cpu_peak(functools.partial(in_child, make, config), config.model)
    ratio = spread(paired_ratios(samples["model"], samples["against"]))
    again = spread(paired_ratios(samples["again"], samples["against"]))
    known = all(memory.values())
    return {
        "ratio": ratio,
        "plain_ratio": again,
        "noise": noise(again),
        "verdict": judge(ratio, again, config.bar),
        "peak_memory_mib": memory,
        "memory_ratio": memory["recorder"] / memory["plain"] if known else None,
        "ms_per_pass": {
            name: 1000 * statistics.median(samples[side]) / timings.passes
            for name, side in (("recorder", "model"), ("plain", "against"))
        },
        "threads": torch.get_num_threads(),
        "cpu_share": timings.cpu_share,
        "sample_seconds": samples,
    }


def memory_outcome(config: Config, results: dict[str, Any]) -> str:
    """`met` or `missed`; `unknown` where the system does not tell a process its memory."""
    if results["memory_ratio"] is None:
        return "unknown"
    return "met" if results["memory_ratio"] <= config.memory_bar else "missed"


def report(config: Config, results: dict[str, Any]) -> str:
    """The results as a person reads them."""
    ratio, again, verdict = results["ratio"], results["plain_ratio"], results["verdict"]
    times, peaks = results["ms_per_pass"], results["peak_memory_mib"]
    memory = "unknown"
    if results["memory_ratio"] is not None:
        memory = f"{results['memory_ratio']:.2f} ({peaks['recorder']:.1f} / {peaks['plain']:.1f} MiB)"
    lines = [
        f"{config.model}, {config.img_size}x{config.img_size}, batch {config.batch}, {config.device}, "
        f"{results['threads']} threads: all measures of all layers",
        f"recorder / plain  {ratio['median']:.3f} ({ratio['q1']:.3f} .. {ratio['q3']:.3f}), "
        f"{times['recorder']:.0f} / {times['plain']:.0f} ms",
        f"plain / plain     {again['median']:.3f} ({again['q1']:.3f} .. {again['q3']:.3f})",
        f"peak memory       {memory}; the bar of {config.memory_bar} is {memory_outcome(config, results)}",
        f"the bar of {config.bar} + noise {verdict['noise']:.3f} on the time is {verdict['outcome']}",
    ]
    return "\n".join([*lines, *speed.warnings(config.timing(), results)])


def run(config: Config) -> tuple[str, int]:
    """Measure, write the record, and return the report with the exit status."""
    name = f"{PROTOCOL.replace('/', '-')}__{config.model}__{config.img_size}__b{config.batch}__{config.device}.json"
    path = Path("results") / name if config.out is None else config.out
    if path.is_dir():
        raise UserError(f"--out must name a file, and {path} is a folder")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device; use --device cpu")
    with speed.restored_settings():
        speed.apply_settings(config.timing())
        results = measure(config)
        write_record(path, protocol=PROTOCOL, results=results, config=config, seed=config.seed)
    missed = "missed" in (results["verdict"]["outcome"], memory_outcome(config, results))
    return f"{report(config, results)}\nrecord: {path}", int(config.strict and missed)
