"""The training loop on accelerate: one CPU, one GPU or many processes, the same code and the same numbers.

Everything random in a step is drawn from a seed that is a function of (seed, epoch, update, process), and a
checkpoint holds the rest. So a run that was killed continues as if it had not been.
"""

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from timm.data import resolve_model_data_config
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from timm_locat.data import ImageData, ImageStream
from timm_locat.data.show import show_batch
from timm_locat.errors import UserError
from timm_locat.record import atomic_write, plain_json
from timm_locat.train.bare import BareLoop, synchronize
from timm_locat.train.broken import Broken
from timm_locat.train.build import build_model, build_optimizer, build_samples, build_schedule, open_sets
from timm_locat.train.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from timm_locat.train.config import TrainConfig
from timm_locat.train.course import Course
from timm_locat.train.feed import Feed, MicroBatch
from timm_locat.train.finish import finish
from timm_locat.train.launched import check_processes, choose_threads
from timm_locat.train.publish import check_publishing, publish
from timm_locat.train.run_folder import COLUMNS, check_same_run, choose_folder, counted, describe, to_csv
from timm_locat.train.samples import (
    BatchPlan,
    batches,
    normaliser,
    permuted,
    seed_for,
)
from timm_locat.train.scores import evaluate, in_step
from timm_locat.train.session import Interrupted, StopRequest, deterministic, new_accelerator, peak_memory_mib
from timm_locat.train.state import (
    check_sharding,
    is_sharded,
    load_states,
    model_state,
    name_blocks,
    optimizer_state,
)
from timm_locat.train.trackers import check_tracker, start_tracker

__all__ = ["Interrupted", "Trainer", "train"]

_logger = logging.getLogger(__name__)

NOT_FINITE = "not_finite.pt"
"""State of a run before the update whose loss was not finite."""


def train(config: TrainConfig, recipe: str = "run", trainer: "type[Trainer] | None" = None) -> dict[str, Any]:
    """Run `config` to its end and return the results that its record holds (none with `show_batch`).

    Args:
        config: The run.
        recipe: Its name; names the run folder when `config.out` is None.
        trainer: What kind of training it is; None for that of a classifier.

    Raises:
        UserError: What the user can mend: data, model, sizes, a full disk, a loss that is not finite.
    """
    with deterministic(config.deterministic):
        run = (trainer or Trainer)(config, recipe)
        if config.show_batch is not None:
            run.show_batch(config.show_batch)
            return {}
        with run.stop.listen():
            return run.fit()


class Trainer:
    """One training run, ready to go once constructed (and at its last checkpoint, if `config.resume` says so).

    This is the training of a classifier. Another kind overrides what is specific to it: the model, its images, a
    forward pass, what follows a step, what is measured.

    Args:
        config: The run.
        recipe: Its name.
    """

    columns = COLUMNS
    """Of `metrics.csv`."""
    summed = ("loss", "correct", "images", "norms")
    """What is added up in an epoch, this process's share: the last one over updates, the others over images. Every kind
    of training begins with `loss` and ends with `images` and `norms`."""

    def __init__(self, config: TrainConfig, recipe: str = "run") -> None:
        self.config = config
        self.recipe = recipe
        self.stop = StopRequest()
        check_tracker(config)
        check_publishing(config)
        self.accelerator = new_accelerator(config)
        self.is_main = self.accelerator.is_main_process
        self.device = self.accelerator.device
        self.processes, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        check_processes(self.processes)
        check_sharding(self.accelerator, config)
        if self.device.type == "cpu":
            choose_threads()
        self._open()
        self.folder = self._choose_folder() if config.show_batch is None else Path()
        self.epoch, self.update = 0, 0
        self.sums = self._no_sums()
        self.history: list[dict[str, Any]] = []
        self.broken = Broken(config.skip_broken, self.folder if self.is_main else None)
        self.feed = Feed(
            self.train_samples,
            self.plan,
            self.protocol,
            len(self.classes),
            device=self.device,
            rank=self.rank,
            workers=config.data.workers,
            broken=self.broken,
        )
        self.course = Course(
            config.record_locality,
            config.epochs * self.plan.updates_per_epoch,
            folder=self.folder,
            model=self.backbone,
            samples=self.test_samples,
            prepare=self.prepare,
            is_main=self.is_main,
        )
        self._resume()

    def _open(self) -> None:
        """Open the data, build what it trains, and plan who sees what."""
        config = self.config
        train_set, test_set = open_sets(config.data)
        self.classes = train_set.classes
        # On a CPU, the fused kernel takes twice as long as plain attention in bfloat16.
        fused = not (self.device.type == "cpu" and self.accelerator.mixed_precision == "bf16")
        torch.manual_seed(seed_for(config.seed))
        model, self.backbone = self._build(fused)
        self.num_parameters = sum(p.numel() for p in self.backbone.parameters())
        facts = resolve_model_data_config(self.backbone)
        self._open_samples(train_set, test_set, progress=self.is_main and sys.stderr.isatty())
        if is_sharded(self.accelerator) and self.test_samples.num_images is None:
            raise UserError(
                f"nothing states how many images the streamed test split of {config.data.name} has, which sharded "
                "processes need to evaluate in step; leave streaming or sharding out"
            )
        self.plan = BatchPlan(
            self.train_samples.num_images,
            config.global_batch_size,
            config.grad_accum_steps,
            self.processes,
            config.seed,
            config.data.updates_per_epoch,
        )
        self.prepare = normaliser(facts, self.device)
        if config.data.permute_patches is not None:
            self.prepare = permuted(self.prepare, self.backbone, config.data.permute_patches)
        if config.grad_checkpointing:
            model.set_grad_checkpointing(True)
        optimizer = build_optimizer(config, model)
        self.schedule = self._build_schedule(optimizer)
        self.ema = None
        if config.ema_decay is not None:
            self.ema = ModelEmaV3(model.to(self.device), decay=config.ema_decay, use_warmup=True)
        # Kept because accelerate's `unwrap_model`, asked for the model without autocast, takes autocast off for good.
        self.bare_model = model
        if is_sharded(self.accelerator):
            name_blocks(model)
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        # The names of the weights stay those of the model: only the calls go through the compiled one.
        self.model = torch.compile(self.wrapped) if config.compile else self.wrapped
        self.bare = None
        if config.compare_bare:
            self.bare = BareLoop(config.grad_accum_steps, self.model, lambda: self.accelerator.no_sync(self.wrapped))

    def _build(self, fused: bool) -> tuple[nn.Module, nn.Module]:
        """What is trained; and the timm model that says how its images look, is measured, and is exported."""
        model = build_model(self.config, len(self.classes), fused=fused)
        return model, model

    def _open_samples(self, train: ImageData | ImageStream, test: ImageData | ImageStream, *, progress: bool) -> None:
        """Set `protocol`, `train_samples` and `test_samples`."""
        self.protocol, self.train_samples, self.test_samples = build_samples(
            self.config, self.backbone, train, test, progress=progress
        )

    def _build_schedule(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        """What sets the learning rate before each update."""
        return build_schedule(self.config, optimizer, self.plan.updates_per_epoch)

    def _no_sums(self) -> Tensor:
        return torch.zeros(len(self.summed), dtype=torch.float64, device=self.device)

    def _choose_folder(self) -> Path:
        """The run folder: as asked for, or a new one; the main process decides for all."""
        folder = [None]
        if self.is_main:
            folder = [choose_folder(self.config, self.recipe)]
        broadcast_object_list(folder)
        if isinstance(folder[0], UserError):
            raise folder[0]
        return folder[0]

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "config": plain_json(self.config),
            "epoch": self.epoch,
            "update": self.update,
            "history": self.history,
            "sums": self.accelerator.reduce(self.sums, reduction="sum"),
            "model": model_state(self.accelerator, self.bare_model),
            "ema": self.ema.module.state_dict() if self.ema is not None else None,
            "optimizer": optimizer_state(self.accelerator, self.bare_model, self.optimizer),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "broken": self.broken.files,
            "precision": self.accelerator.mixed_precision,
        }

    def save(self, name: str = CHECKPOINT) -> None:
        """Write a checkpoint of this moment, which is between two updates.

        Args:
            name: Of the file in the run folder; runs are taken up again from the default one.
        """
        if self.config.skip_broken:
            self.broken.merge(gather_object([self.broken.files]))
        state = self._state()
        if self.is_main:
            save_checkpoint(self.folder, state, name)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        if self.config.resume == "never":
            return
        state = load_checkpoint(self.folder)
        found = gather_object([None if state is None else (state["epoch"], state["update"])])
        if len(set(found)) > 1:
            raise UserError(
                f"the machines see different checkpoints in {self.folder}: put the run folder where all of them see it"
            )
        if state is None:
            return
        check_same_run(state["config"], plain_json(self.config), self.folder)
        precision = self.accelerator.mixed_precision
        if state.get("precision", precision) != precision:  # not there in older ones
            raise UserError(
                f"{self.folder} holds a run in precision {state['precision']!r}, and here it would go on in "
                f"{precision!r}: go on where it began, or say accelerate launch --mixed_precision {state['precision']}"
            )
        self._load(state)
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.epoch, self.update, self.history = state["epoch"], state["update"], state["history"]
        self.broken.files = dict(state.get("broken", {}))  # not there before there was skip_broken
        if self.is_main:  # the sums of all processes, so that adding up counts them once
            self.sums += state["sums"].to(self.device)
        self.log(f"going on in {self.folder} at epoch {self.epoch + 1}, update {self.update + 1}")

    def _load(self, state: dict[str, Any]) -> None:
        """Take over the weights of a checkpoint, and what goes with them."""
        load_states(self.accelerator, self.bare_model, self.optimizer, (state["model"], state["optimizer"]))
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])

    def log(self, text: str) -> None:
        if self.is_main:
            _logger.info(text)

    def fit(self) -> dict[str, Any]:
        """Train to the end, evaluate, and leave weights, metrics, curves and the record in the run folder."""
        config, start = self.config, time.perf_counter()
        self.log(
            f"{config.model}: {self.num_parameters:,} parameters, {len(self.classes)} classes; "
            f"{counted(self.train_samples.num_images)} training and {counted(self.test_samples.num_images)} test "
            f"images of {config.data.name}; "
            f"{self.processes} process(es) on {self.device.type}, {torch.get_num_threads()} threads, "
            f"precision {self.accelerator.mixed_precision}; run folder {self.folder}"
        )
        start_tracker(self.accelerator, config, self.folder)
        tested = None
        if self.epoch == self.update == 0:
            self.course.visit(0)
        while self.epoch < config.epochs:
            row = self._train_epoch()
            last = self.epoch == config.epochs
            if last or self.epoch % config.eval_every == 0:
                tested = self.evaluate()
                row |= self._tested(tested)
            self.history.append(row)
            self.log(self._describe(row))
            self._track(row)
            if self.is_main:
                atomic_write(self.folder / "metrics.csv", to_csv(self.history, self.columns))
            if last or self.epoch % config.checkpoint_every == 0:
                self.save()
        results = self._finish(tested or self.evaluate(), time.perf_counter() - start)
        self.accelerator.end_training()
        publish(self)
        return results

    def _train_epoch(self) -> dict[str, Any]:
        """The rest of the current epoch; returns its row of the metrics, the test columns still empty."""
        config, plan = self.config, self.plan
        self.feed.start(self.epoch, self.update)
        first, start = self.update, time.perf_counter()
        self.model.train()
        bar = tqdm(
            total=plan.updates_per_epoch,
            initial=self.update,
            desc=f"epoch {self.epoch + 1}/{config.epochs}",
            unit="update",
            leave=False,
            disable=None if self.is_main else True,  # None: on a terminal only
        )
        with bar:
            while self.update < plan.updates_per_epoch:
                began = time.perf_counter()
                images = self._train_update()
                # `start` moves on by what comparisons and measurements take: training did not take it.
                if self.bare is not None:
                    synchronize(self.device)
                    start += self.bare.after(self.update, time.perf_counter() - began, images)
                    self.optimizer.zero_grad()
                self.update += 1
                start += self.course.visit(self.updates_done)
                bar.update()
                if self.update % 10 == 0 or self.update == plan.updates_per_epoch:
                    self._show(bar, (self.update - first) / (time.perf_counter() - start))
                self._stop_if_asked()
        seconds = time.perf_counter() - start
        sums = self.accelerator.reduce(self.sums, reduction="sum").tolist()
        sums = dict(zip(self.summed, sums, strict=True))
        row = {
            **dict.fromkeys(self.columns),
            "epoch": self.epoch + 1,
            "lr": self.optimizer.param_groups[0]["lr"],
            **self._trained(sums),
            "grad_norm": sums["norms"] / (plan.updates_per_epoch * self.processes),
            "images_per_second": (self.update - first) * config.global_batch_size / seconds,
            "seconds": seconds,
            "data_seconds": self.feed.waited,
            "peak_memory_mib": peak_memory_mib(self.accelerator),
        }
        self.sums.zero_()
        self.epoch, self.update = self.epoch + 1, 0
        return row

    def _train_update(self) -> Tensor:
        """One optimizer step over `grad_accum_steps` micro-batches; returns the normalised images of the last one."""
        config = self.config
        self.schedule.step_update(self.updates_done)
        sums = self._no_sums()
        for step in range(config.grad_accum_steps):
            batch = next(self.feed)
            torch.manual_seed(batch.seed)  # dropout and stochastic depth draw from the global generator
            last = step == config.grad_accum_steps - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                images, loss, counts = self._forward(batch)
                # Gradients are averaged over processes; this makes them those of the mean over the global batch.
                self.accelerator.backward(loss * (self.processes / config.global_batch_size))
            with torch.no_grad():
                sums[:-2] += torch.stack([count.double() for count in (loss, *counts)])
                sums[-2] += len(batch.labels)
        norm = self._clip()
        sums[-1] += torch.where(norm.isfinite(), norm, 0.0)  # fp16's loss scaler skips the other updates
        # Augmenting the next batch waits for the device, to which it copies its draws: asking afterwards costs no wait.
        self.feed.prepare()
        self._check(sums[0], norm)
        self.sums += sums
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._after_step()
        return images

    @property
    def updates_done(self) -> int:
        """Number of updates before this moment, over all epochs."""
        return self.epoch * self.plan.updates_per_epoch + self.update

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """One forward pass.

        Returns:
            The normalised images; the sum of the loss over them; and of what else is `summed`, up to `images`.
        """
        images = self.prepare(batch.images)
        logits = self.model(images).float()
        loss = F.cross_entropy(logits, batch.targets, reduction="sum")
        return images, loss, ((logits.argmax(1) == batch.labels).sum(),)

    def _clip(self) -> Tensor:
        """Clip the gradients; returns their norm before."""
        limit = math.inf if self.config.clip_grad is None else self.config.clip_grad
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), limit)
        return norm.full_tensor() if is_sharded(self.accelerator) else norm

    def _after_step(self) -> None:
        """What follows a step of the optimizer."""
        if self.ema is not None:
            self.ema.update(self.bare_model, step=self.updates_done)

    def _trained(self, sums: dict[str, float]) -> dict[str, float]:
        """Columns of the metrics from the sums of an epoch."""
        return {
            "train_loss": sums["loss"] / sums["images"],
            "train_accuracy": 100 * sums["correct"] / sums["images"],
        }

    def _tested(self, tested: dict[str, float]) -> dict[str, float | None]:
        """Columns of the metrics from what `evaluate` returned."""
        return {
            "test_loss": tested["loss"],
            "test_accuracy": tested["accuracy"],
            "ema_accuracy": tested.get("ema_accuracy"),
        }

    def _describe(self, row: dict[str, Any]) -> str:
        """One line about an epoch."""
        return describe(row, self.config.epochs)

    def _finish(self, tested: dict[str, float], seconds: float) -> dict[str, Any]:
        """Leave weights, pictures and the record; returns the results."""
        return finish(self, tested, seconds)

    def show_batch(self, path: Path) -> None:
        """Draw the first batch of the run as the model would see it."""
        batch = next(self.feed)
        title = f"protocol {self.config.data.protocol} on {self.config.data.name}"
        show_batch(batch.images, batch.targets, self.classes, path, title)
        self.log(f"wrote {path}; nothing was trained")

    def _check(self, loss: Tensor, norm: Tensor) -> None:
        """Stop before an update that would spoil the weights, with the state saved and its images named.

        Processes also tell each other here whether they were asked to stop.

        Args:
            loss: Sum over this process's images.
            norm: Of the gradient of the global batch; fp16's loss scaler deals with one that is not finite.
        """
        wrong = ~loss.isfinite()
        if self.accelerator.scaler is None:
            wrong = wrong | ~norm.isfinite()
        flags = torch.stack((wrong, torch.full_like(wrong, self.stop.made))).double()
        if self.processes > 1:  # the loss is this process's own, and a signal may reach one before the others
            flags = self.accelerator.reduce(flags, reduction="sum")
        wrong, self.stop.agreed = (count > 0 for count in flags.tolist())
        if not wrong:
            return
        self.optimizer.zero_grad()
        images = self.feed.sources(self.epoch, self.update)
        mine = {"rank": self.rank, "loss": plain_json(loss.item() / len(images)), "images": images}
        told = {"epoch": self.epoch + 1, "update": self.update + 1, "processes": gather_object([mine])}
        if self.is_main:
            atomic_write(self.folder / "not_finite.json", json.dumps(told, indent=1) + "\n")
        self.save(NOT_FINITE)
        raise UserError(
            f"the loss or its gradient is not finite in epoch {self.epoch + 1}, update {self.update + 1}: its images "
            f"are named in {self.folder}/not_finite.json, the state before it is in {NOT_FINITE} there, and the last "
            "checkpoint is untouched; try a smaller peak_lr, or mixed_precision no"
        )

    def _show(self, bar: tqdm, updates_per_second: float) -> None:
        """Refresh the bar, and the tracker if there is one."""
        numbers = self._trained(dict(zip(self.summed, self.sums.tolist(), strict=True)))
        rate = self.optimizer.param_groups[0]["lr"]
        shown = {name.removeprefix("train_"): f"{value:.3g}" for name, value in numbers.items()}
        bar.set_postfix(**shown, lr=f"{rate:.1e}", img_s=f"{updates_per_second * self.config.global_batch_size:.0f}")
        self._track({"running_loss": numbers["train_loss"], "lr": rate})

    def _track(self, numbers: dict[str, float | None]) -> None:
        """Hand numbers to the tracker."""
        if self.config.tracker != "none":
            known = {name: value for name, value in numbers.items() if value is not None}
            self.accelerator.log(known, step=self.updates_done)

    def _stop_if_asked(self) -> None:
        stop = self.stop.agreed if self.processes > 1 else self.stop.made
        if stop:
            self.save()
            raise Interrupted(
                f"stopped in epoch {self.epoch + 1} after update {self.update}, state saved; "
                f"go on with the same command and --out {self.folder} --resume auto"
            )

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test split, every image once; those of the moving average under `ema_...`."""
        self.model.eval()
        # Without the DDP wrapper: processes may have different numbers of batches here.
        results = self._test(self.accelerator.unwrap_model(self.wrapped))
        if self.ema is not None:
            averaged = self._test(self.ema.module)
            results |= {f"ema_{name}": averaged[name] for name in ("loss", "accuracy", "top5")}
        return results

    def _test(self, forward: Callable[[Tensor], Tensor]) -> dict[str, float]:
        size = 4 * self.plan.micro_batch_size
        ids = self.test_samples.evaluation_ids(size, self.rank, self.processes)
        source = batches(self.test_samples, ids, workers=self.config.data.workers)
        if is_sharded(self.accelerator):
            passes = math.ceil(math.ceil(self.test_samples.num_images / self.processes) / size)
            idle = self.prepare(torch.zeros(1, 3, *self.test_samples.transform.img_size, dtype=torch.uint8))
            source = in_step(source, passes, lambda: forward(idle))
        with self.accelerator.autocast():
            return evaluate(forward, source, self.prepare, self.accelerator, len(self.classes))
