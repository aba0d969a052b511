"""Time and memory of one model against another, in one process, interleaved and paired.

A ratio of two separate timings carries the machine's mood at two moments. Here every round times three runs back to
back in changing order: the model, the one it is held against, and a second instance of that one. A round gives two
ratios: model / against, which is wanted, and against again / against, which would be 1 on a quiet machine. How far
the second strays is the noise that the first must be read with.
"""

import contextlib
import functools
import gc
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from timm.layers import set_fused_attn, use_fused_attn
from torch import Tensor

from eval.memory import cpu_peak, cuda_peak
from eval.paired import QUIET_CPU_SHARE, SIDES, judge, noise, paired_ratios, round_orders, spread
from timm_locat.errors import UserError, require
from timm_locat.models import create_model, parse_kwargs
from timm_locat.record import write_record

PROTOCOL = "speed/v1"
MIN_SAMPLE_S = 0.1  # below this a sample on a shared machine is mostly the scheduler's
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Time and memory of one model against another, interleaved and paired in one process.

    Every round times MODEL, AGAINST and a second instance of AGAINST back to back, in changing order. Reported are
    the median of MODEL / AGAINST over the rounds, the same for AGAINST / AGAINST as the floor of noise,
    milliseconds per image, and the peak memory of one pass.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """timm name of the model in question."""
    against: Annotated[str, tyro.conf.arg(metavar="MODEL")]
    """timm name of the model it is held against."""
    img_size: tuple[int, ...] = (224,)
    """Image side in pixels, or height and width."""
    batch: int = 8
    """Images per pass."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast to this type; the weights stay float32."""
    train: bool = False
    """Time forward and backward of the mean squared logit, instead of inference. No optimizer, no gradient scaler."""
    pairs: int = 15
    """Rounds, each of which gives one ratio; at least 3."""
    warmup: int = 2
    """Passes of each run before anything is timed."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads of torch; torch's own choice when left out."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    unfused: bool = False
    """Switch fused attention off in both, through timm's `set_fused_attn`."""
    model_kwargs: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Build arguments of MODEL as a JSON object, such as '{"depth": 2}'."""
    against_kwargs: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """Build arguments of AGAINST as a JSON object."""
    seed: int = 0
    """Seed of weights, images and order."""
    bar: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Largest ratio allowed. It is met when the median of MODEL / AGAINST is at most the bar plus the noise, where the
    noise is how far the median of AGAINST / AGAINST lies from 1, plus half of its interquartile range."""
    strict: bool = False
    """Leave with status 1 unless the bar is met; otherwise the status is 0 either way."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of the record; a name made of the settings, in ./results, when left out."""

    def __post_init__(self) -> None:
        if len(self.img_size) not in (1, 2) or min(self.img_size) < 1:
            raise ValueError(f"--img-size takes one or two sides of at least 1 pixel, got {self.img_size}")
        for name, least in (("batch", 1), ("pairs", 3), ("warmup", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, got {value}")
        if self.bar is not None and not (math.isfinite(self.bar) and self.bar > 0):
            raise ValueError(f"--bar must be a ratio above 0, such as 1.2, got {self.bar}")
        if self.strict and self.bar is None:
            raise ValueError("--strict says what to do when the bar is not met, so it needs --bar")
        for name in ("model_kwargs", "against_kwargs"):
            parse_kwargs(getattr(self, name), f"--{name.replace('_', '-')}")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.img_size[0], self.img_size[-1]

    def side(self, side: str) -> tuple[str, dict[str, Any]]:
        """Model name and build arguments of one of `SIDES`."""
        if side == "model":
            return self.model, parse_kwargs(self.model_kwargs, "--model-kwargs")
        return self.against, parse_kwargs(self.against_kwargs, "--against-kwargs")


def make_step(config: Config, side: str) -> Step:
    """Build one side's model and random images; the step is one pass over the batch and returns its logits."""
    name, kwargs = config.side(side)
    torch.manual_seed(config.seed)
    model = create_model(name, img_size=config.size, **kwargs).to(config.device).train(config.train)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (config.batch, kwargs.get("in_chans", 3), *config.size)
    images = torch.randn(shape, generator=generator).to(config.device)
    dtype = DTYPES[config.dtype]

    def forward() -> Tensor:
        with torch.autocast(config.device, dtype=dtype, enabled=dtype != torch.float32):
            return model(images)

    def evaluate() -> Tensor:
        with torch.inference_mode():
            return forward()

    def train() -> Tensor:
        logits = forward()
        logits.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        return logits.detach()

    return train if config.train else evaluate


def check_output(step: Step, name: str, config: Config) -> None:
    """Refuse to time a model that cannot take the images, or whose output is not finite logits."""
    try:
        logits = step()
    except (AssertionError, ValueError) as err:
        shape = f"{config.batch} images of {config.size[0]}x{config.size[1]}"
        raise UserError(f"{name} cannot take {shape}: {err or type(err).__name__}") from err
    if not isinstance(logits, Tensor):
        raise UserError(f"{name} returns a {type(logits).__name__}, expected one tensor of logits; change its kwargs")
    if not logits.isfinite().all():
        raise UserError(f"{name} gives logits that are not finite in {config.dtype}; its time would mean nothing")


def apply_settings(config: Config) -> None:
    """Set torch's threads and timm's fused attention for this process."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.unfused:
        set_fused_attn(False)


@contextlib.contextmanager
def restored_settings() -> Iterator[None]:
    """Put back what `apply_settings` changes."""
    threads, fused, experimental = torch.get_num_threads(), use_fused_attn(), use_fused_attn(experimental=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        set_fused_attn(fused, experimental)


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """No garbage collection inside, as in timeit: it would land in whichever run is on."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def step_in_child(config: Config, side: str) -> Step:
    """`make_step` for a fresh process, which starts with settings of its own."""
    apply_settings(config)
    return make_step(config, side)


def seconds(step: Step, passes: int, device: str) -> float:
    """Wall-clock time of some passes, from idle device to idle device."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    for _ in range(passes):
        step()
    wait()
    return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """What the rounds gave, before any statistics."""

    samples: dict[str, list[float]]
    """Seconds of each run, one for each round."""
    passes: int
    """Passes that one sample holds."""
    cpu_share: float | None
    """Part of the time that the timing thread had a core, 0 to 1; None on CUDA, where it waits for the device."""


def time_rounds(steps: dict[str, Step], config: Config) -> Timings:
    """Warm up, choose how many passes make a sample, and time every run in every round."""
    for _ in range(config.warmup):
        for step in steps.values():
            step()
    one_pass = statistics.median(seconds(steps["against"], 1, config.device) for _ in range(3))
    passes = max(1, math.ceil(MIN_SAMPLE_S / one_pass))
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    tqdm = require("tqdm", "eval", "the progress bar of python -m eval speed").tqdm
    # disable=None: a bar on a terminal, nothing in a log file
    bar = tqdm(round_orders(config.pairs, config.seed), desc="rounds", leave=False, disable=None)
    with paused_collection():
        wall, own = time.perf_counter(), time.thread_time()
        for order in bar:
            for side in order:
                samples[side].append(seconds(steps[side], passes, config.device))
        share = (time.thread_time() - own) / (time.perf_counter() - wall)
    return Timings(samples=samples, passes=passes, cpu_share=None if config.device == "cuda" else min(1.0, share))


def measure(config: Config) -> dict[str, Any]:
    """The results of a record: everything the command reports, and the seconds that it was computed from."""
    steps = {side: make_step(config, side) for side in SIDES}
    for side, step in steps.items():
        check_output(step, config.side(side)[0], config)
    timings = time_rounds(steps, config)
    samples, images = timings.samples, timings.passes * config.batch
    if config.device == "cuda":
        memory = {side: cuda_peak(steps[side]) for side in SIDES[:2]}
    else:
        make = {side: functools.partial(step_in_child, config, side) for side in SIDES[:2]}
        memory = {side: cpu_peak(make[side], config.side(side)[0]) for side in SIDES[:2]}
    ratio = spread(paired_ratios(samples["model"], samples["against"]))
    plain = spread(paired_ratios(samples["again"], samples["against"]))
    threads = torch.get_num_threads()
    return {
        "ratio": ratio,
        "plain_ratio": plain,
        "noise": noise(plain),
        "ms_per_image": {side: 1000 * statistics.median(samples[side]) / images for side in SIDES},
        "peak_memory_mib": memory,
        "verdict": None if config.bar is None else judge(ratio, plain, config.bar),
        "threads": threads,
        "cpu_share": timings.cpu_share,
        "passes_per_sample": timings.passes,
        "sample_seconds": samples,
    }


def file_name(config: Config) -> str:
    """Name of the record; what is not at its default beyond size, batch, dtype and mode is added at the end."""
    height, width = config.size
    size = f"{height}" if height == width else f"{height}x{width}"
    mode = "train" if config.train else "eval"
    protocol = PROTOCOL.replace("/", "-")
    parts = [protocol, config.model, "vs", config.against, size, f"b{config.batch}", config.dtype, mode]
    more = {
        config.device: config.device != "cpu",
        f"t{config.threads}": config.threads is not None,
        "unfused": config.unfused,
    }
    parts += [word for word, is_set in more.items() if is_set]
    kwargs = [config.side(side)[1] for side in SIDES[:2]]
    if any(kwargs):
        parts.append("kw" + hashlib.sha256(json.dumps(kwargs, sort_keys=True).encode()).hexdigest()[:6])
    return "__".join(parts) + ".json"


def report(config: Config, results: dict[str, Any]) -> str:
    """The results as a person reads them."""
    names = {"model": config.model, "against": config.against, "again": f"{config.against} (again)"}
    width = max(map(len, names.values()))
    mode = "train (forward + backward)" if config.train else "eval"
    lines = [
        f"{mode}, {config.size[0]}x{config.size[1]}, batch {config.batch}, {config.dtype}, {config.device}; "
        f"{config.pairs} rounds of {results['passes_per_sample']} passes",
        "",
        f"{'':<{width}}  {'ms/image':>9}  {'peak MiB':>9}",
    ]
    for side, name in names.items():
        peak = results["peak_memory_mib"].get(side)
        shown = "" if side == "again" else "unknown" if peak is None else f"{peak:.1f}"
        lines.append(f"{name:<{width}}  {results['ms_per_image'][side]:>9.3f}  {shown:>9}".rstrip())
    lines += ["", f"{'':<{width}}  {'median':>9}  {'middle half':>15}  {'range':>15}"]
    for key, label in (("ratio", "model / against"), ("plain_ratio", "again / against")):
        row = results[key]
        half, whole = f"{row['q1']:.3f} .. {row['q3']:.3f}", f"{row['min']:.3f} .. {row['max']:.3f}"
        lines.append(f"{label:<{width}}  {row['median']:>9.3f}  {half:>15}  {whole:>15}")
    return "\n".join([*lines, "", verdict_line(config, results), *warnings(config, results)])


def warnings(config: Config, results: dict[str, Any]) -> list[str]:
    """What the reader should know before believing the numbers: one sentence each, none on a quiet machine."""
    said = []
    share = results["cpu_share"]
    if share is not None and share < QUIET_CPU_SHARE:
        ratio = " and the ratio lies too near 1" if results["threads"] > 1 else ""
        remedy = " or with --threads 1, which spares the ratio" if results["threads"] > 1 else ""
        said.append(
            f"warning: other programs were running; the timing thread had a core only {share:.0%} of the time, so the "
            f"times are too long{ratio}: repeat it on a quiet machine{remedy}"
        )
    return said


def verdict_line(config: Config, results: dict[str, Any]) -> str:
    """One sentence: the ratio with its noise, and whether it is within the bar."""
    said = f"{config.model} takes {results['ratio']['median']:.3f} times as long as {config.against}"
    verdict = results["verdict"]
    if verdict is None:
        return f"{said} (noise {results['noise']:.3f})"
    limit = f"{verdict['bar']:.3f} + noise {verdict['noise']:.3f} = {verdict['limit']:.3f}"
    return f"{said}; the bar of {limit} is {verdict['outcome']}"


def run(config: Config) -> tuple[str, int]:
    """Measure, write the record, and return the report with the exit status."""
    path = Path("results") / file_name(config) if config.out is None else config.out
    if path.is_dir():
        raise UserError(f"--out must name a file, and {path} is a folder")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device; use --device cpu")
    with restored_settings():
        apply_settings(config)
        try:
            results = measure(config)
        except torch.OutOfMemoryError as err:
            raise UserError("the device has too little memory for these models; lower --batch or --img-size") from err
        write_record(path, protocol=PROTOCOL, results=results, config=config, seed=config.seed)
    status = int(config.strict and results["verdict"]["outcome"] != "met")
    return f"{report(config, results)}\nrecord: {path}", status
