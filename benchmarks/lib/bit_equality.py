"""Check that two checkouts train to the same numbers, bit for bit, from the command line.

    python -m benchmarks.lib.bit_equality --reference ../before --cache before.json     # all cases
    python -m benchmarks.lib.bit_equality --reference ../before --cases sync-2,biggan   # some of them
    python -m benchmarks.lib.bit_equality --list                                        # their names and commands

Each case is one short training (or a few commands in a row) that is run with `python -m paragan` of the reference
checkout and of the current one (`--current`, by default the one that holds this file), each in a folder of its own.
Compared are

* every tensor of every `*.safetensors` file of the run folder: parameters, buffers, optimizer states, averages, past
  rounds, the memories of the exchanges, of all ranks in the newest checkpoint, and the models. Also the arrays of every
  `*.npz` that the case writes. Names may differ: what is compared is the multiset of (dtype, shape, SHA-256 of the
  bytes). Tensors without a partner are printed by their names;
* the numbers of every `stats.jsonl` and `metrics.jsonl` (losses, scores of D, health, bytes sent, FD, ...), line by
  line, for keys that both sides have. Times, memory and the state of the data loader are left out. Keys that only one
  side has are printed as a note and are not a difference.

With `--cache FILE` the results of the reference are kept in a JSON file and used again as long as the case, the source
code of the reference, the version of torch and the processor are the same.

Cases are written in the words of the command line at commit a9548de. RENAMED maps words that changed since to their new
form. It is applied for a checkout only as far as that checkout lists the new field (`paragan train --fields`), so that
either side may be older or newer. A command that has to be written differently for the current side is given whole, in
`Case.current`.

The exit status is 1 if a case differs or fails, else 0. `--perturb=--seed=1` adds an argument to the training commands
of the current side, to see that a change is found.

Not covered because they do not repeat: `async-gossip` and asynchronous teams with `lead` above 1 (what a rank sees
depends on how fast messages are), `split=auto`, `--strategy auto` and `device.layout=measured` (they measure time).
Teams with `lead=1` repeat (docs/async.md) and are covered. Gossip runs are given a `lost_after_s` that a busy machine
does not reach.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Arguments of every `train` command. One checkpoint is kept, so that every file in the run folder is of the newest.
COMMON = ("--run-dir=run", "--seed=0", "--device.threads=1", "--output.keep=1", "--evaluation.metrics=[]")

# Old words to new ones: a field (with the fields below it), or one value of a field, "--field=value".
RENAMED = {
    "--strategy.every": "--strategy.sync_period",
    "--strategy.local_steps": "--strategy.sync_period",
    "--strategy.exact": "--strategy.paper_update",
    "--strategy.rate": "--strategy.consensus_rate",
    "--strategy.lost_after_s": "--strategy.peer_timeout_s",
    "--strategy.lead": "--strategy.max_lead_rounds",
    "--strategy.buffer.last": "--strategy.replay_policy.window",
    "--strategy.buffer": "--strategy.replay_policy",
    "--strategy.within": "--strategy.per_label_strategy",
    "--strategy.share": "--strategy.budget_by",
    "--strategy.order=together": "--strategy.order=simultaneous",
    "--strategy.order=alternately": "--strategy.order=alternating",
    "--average": "--ema",
    "--g.optimism": "--g.optimizer_wrapper",
    "--d.optimism": "--d.optimizer_wrapper",
    "--g.rule": "--g.lr_scaling",
    "--d.rule": "--d.lr_scaling",
    "--data.hold": "--data.cache",
    "--data.feed": "--data.prefetch",
    "--nets.hidden": "--nets.block_width",
    "--nets.rewritten": "--nets.fused_resampling",
    "--device.merge": "--device.lanes_per_pass",
    "--device.one_call": "--device.concat_real_fake",
    "--output.keep": "--output.max_checkpoints",
    "--tune=rates": "--batch-scaling=rates",
}

# Statistics that depend on the clock, the machine and the load.
UNREPEATABLE = re.compile(r"^(Timing|Resources|Data)/|seconds|wait")

LAGS = (
    "--strategy=async --strategy.fake_lags=[2,1,0,3] --strategy.critic_lags=[0,2] --strategy.buffer=replay "
    "--strategy.buffer.fraction=0.5 --strategy.buffer.last=3 --d_steps=2"
)
DATASET = "set.npz"  # what write_dataset makes, in the folder of every case


@dataclass(frozen=True)
class Case:
    """Commands that are run in one folder, one after the other.

    commands : arguments of `paragan`, in the words of commit a9548de; those of `train` are extended by COMMON
    current  : the same for the current side, where RENAMED cannot translate them (empty: translated)
    """

    name: str
    commands: tuple[str, ...]
    current: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A digest of what the reference runs."""
        content = (COMMON, self.commands, inspect.getsource(write_dataset))
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def case(name: str, *commands: str, current: Sequence[str] = ()) -> Case:
    """Return a case of commands that may be broken into lines."""
    old, new = (tuple(" ".join(command.split()) for command in side) for side in (commands, current))
    return Case(name, old, new)


CASES = (
    # Digits, 2 kimg, float32: how ranks work together.
    case(
        "sync-1",
        "train digits --kimg=2 --evaluation.metrics=fd,kid,prdc --evaluation.count=400",
        "sample run --count=32 --labels=3,7 --seed=5 --truncation=0.7 --out=samples.npz",
    ),
    case("sync-2", "train digits --kimg=2 --ranks=2"),
    case("sync-4", "train digits --kimg=2 --ranks=4"),
    case("sync-together-int4-2", "train digits --kimg=2 --ranks=2 --strategy.order=together --strategy.wire=int4"),
    case("local-sgd-2", "train digits --kimg=2 --ranks=2 --strategy.every=2 --strategy.wire=int8"),
    case("quantized-2", "train digits --kimg=2 --ranks=2 --strategy=quantized"),
    case(
        "quantized-exact-2",
        "train digits --kimg=2 --ranks=2 --strategy=quantized --strategy.exact=true --strategy.wire=sign",
    ),
    case("gossip-4", "train digits --kimg=2 --ranks=4 --strategy=gossip --strategy.lost_after_s=100"),
    case(
        "gossip-int8-2",
        """train digits --kimg=2 --ranks=2 --strategy=gossip --strategy.topology=ring --strategy.wire=int8
        --strategy.rounds=2 --strategy.rate=0.7 --strategy.local_steps=2 --strategy.lost_after_s=0""",
    ),
    case("dposg-2", "train digits --kimg=2 --ranks=2 --strategy=DPOSG --strategy.lost_after_s=100"),
    case("async-1", "train digits --kimg=2 --strategy=async"),
    case(
        "async-lags-1",  # stopped at half time and resumed, with images and critics of past rounds
        f"train digits --kimg=1 {LAGS}",
        f"train digits --kimg=2 {LAGS}",
    ),
    case("teams-2", "train digits --kimg=2 --ranks=2 --strategy=async --strategy.split=1:1 --strategy.lead=1"),
    case(
        "teams-3",
        """train digits --kimg=2 --ranks=3 --strategy=async --strategy.split=1:2 --strategy.wire=int8
        --strategy.snapshot_wire=bf16 --strategy.snapshot_every=2 --g_batch=64""",
    ),
    # Three labels: a game for each on two workers, then one generator distilled from them.
    case(
        "per-label-2",
        f"""train digits --kimg=1.5 --ranks=2 --data={DATASET} --strategy=per-label --strategy.share=data
        --evaluation.metrics=fd --evaluation.count=64""",
        "merge run --kimg=0.5",
    ),
    # Networks and objectives, small; default precision (bfloat16 where the processor has it) or float32.
    case(
        "sngan",
        f"""train sngan-cifar10 --data={DATASET} --kimg=0.64 --batch=32 --lanes=4 --d_steps=2 --data.resolution=16
        --nets.width=16 --nets.d_width=16 --objective.r1=1 --objective.r1_every=2 --objective.lecam=0.3
        --objective.augment=ada --objective.augment.kimg=1 --objective.loss=nonsaturating --objective.zcr=5
        --objective.zcr_g=0.5 --average.half_life_kimg=0.2 --data.hold=stream""",
    ),
    case(
        "biggan",
        f"""train biggan-cifar10 --data={DATASET} --kimg=0.192 --batch=32 --lanes=4 --d_steps=1 --nets.width=8
        --nets.d_width=8 --nets.latent=16 --nets.shared=8 --objective.augment=diffaugment --objective.bcr=10
        --objective.orthogonal=1e-4 --objective.d_orthogonal=1e-4 --device.precision=float32""",
    ),
    case(
        "contragan",
        f"""train contragan-cifar10 --data={DATASET} --kimg=0.192 --batch=32 --lanes=4 --d_steps=1 --nets.width=8
        --nets.d_width=8 --nets.latent=16 --nets.embedding=16 --objective.cr=10 --g.optimism=extragradient
        --d.optimizer=lookahead --device.merge=2""",
    ),
    case(
        "r3gan",
        f"""train r3gan-cifar10 --data={DATASET} --kimg=0.32 --batch=32 --lanes=4 --data.resolution=16
        --nets.width=32 --nets.group=8 --g.warm_up_kimg=0.2 --d.schedule=cosine --device.one_call=true
        --policy=paragan""",
    ),
    case("wgan-gp", "train digits --kimg=1 --policy=wcgan-gp --batch=64"),
    case(
        "ramp",
        "train digits --kimg=1.5 --batch=64 --ramp=0.5:128 --tune=rates --objective.classifier=1 "
        "--nets.d_conditioning=classifier --device.precision=auto",
    ),
)


# What a case writes ---------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, "dtype [shape] digest") for each tensor of a safetensors file, of any dtype."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            yield name, describe(about["dtype"], about["shape"], data[start + first : start + last])


def read_npz(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the same for each array of an npz file."""
    with np.load(path) as arrays:
        for name, array in arrays.items():
            yield name, describe(str(array.dtype), array.shape, array.tobytes())


def describe(dtype: str, shape: Sequence[int], data: bytes) -> str:
    return f"{dtype} {list(shape)} {hashlib.sha256(data).hexdigest()}"


def tensors_in(folder: Path) -> dict[str, str]:
    """Return the digest of every tensor below a folder, by "file:name"."""
    digests = {}
    for suffix, read in ((".safetensors", read_safetensors), (".npz", read_npz)):
        for path in sorted(folder.rglob(f"*{suffix}")):
            if path.name != DATASET:
                digests |= {f"{path.relative_to(folder).as_posix()}:{name}": digest for name, digest in read(path)}
    return digests


def numbers_in(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return the repeatable numbers of every line of every stats.jsonl and metrics.jsonl below a folder, by file."""
    lines_of = {}
    for name in ("stats.jsonl", "metrics.jsonl"):
        for path in sorted(folder.rglob(name)):
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            lines_of[path.relative_to(folder).as_posix()] = [repeatable(line) for line in lines]
    return lines_of


def repeatable(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one line that do not depend on the clock."""
    return {k: v for k, v in line.items() if isinstance(v, int | float) and not UNREPEATABLE.search(k)}


@dataclass(frozen=True)
class Result:
    """Result of a case in one checkout. error: of the command that failed, else empty."""

    seconds: float
    tensors: dict[str, str]
    numbers: dict[str, list[dict[str, float]]]
    error: str = ""


# Running --------------------------------------------------------------------------------------------------------------


class Checkout:
    """A checkout of paragan, as a command."""

    def __init__(self, folder: Path, python: str):
        self.folder = folder.resolve()
        self.python = python
        self._fields: dict[str, str] | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment of a command: this checkout's code, and no launcher's variables."""
        overrides = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
        other = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "PARAGAN_")
        return {k: v for k, v in os.environ.items() if not k.startswith(other)} | overrides

    def run(self, arguments: Sequence[str], cwd: Path, timeout_s: float) -> str:
        """Run `python ARGUMENTS` and return what it printed.

        Raises RuntimeError, with the end of the output, if it fails or takes longer than timeout_s. Then it is killed,
        and the ranks it started end with it.
        """
        command_line = shlex.join(arguments)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            environment = self.environment()
            command = [self.python, *arguments]
            process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                status = process.wait(max(timeout_s, 0))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            text = output.read()
        if status is None:
            raise RuntimeError(f"timed out after {timeout_s:.0f} s: {command_line}\n{tail(text)}")
        if status:
            raise RuntimeError(f"exit status {status}: {command_line}\n{tail(text)}")
        return text

    def check_imported(self, cwd: Path) -> None:
        """Exit if `import paragan` would find another checkout than this one."""
        where = self.run(["-c", "import paragan; print(paragan.__file__)"], cwd, 60).strip()
        if not Path(where).resolve().is_relative_to(self.folder):
            sys.exit(f"bit_equality: {self.folder} holds no package paragan: {where} is imported instead")

    def source_digest(self) -> str:
        """Return a digest of the package's source files."""
        digest = hashlib.sha256()
        for path in sorted((self.folder / "paragan").rglob("*")):
            if path.suffix in (".py", ".c"):
                digest.update(path.relative_to(self.folder).as_posix().encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    def fields(self, cwd: Path) -> dict[str, str]:
        """Return what `paragan train --fields` lists: the values that each field takes, by field."""
        if self._fields is None:
            fields: dict[str, str] = {}
            for line in self.run(["-m", "paragan", "train", "--fields"], cwd, 60).splitlines():
                if line.startswith("--"):
                    name, _, values = line.partition(" ")
                    fields[name] = f"{fields.get(name, '')} {values}"
            self._fields = fields
        return self._fields

    def translate(self, argument: str, cwd: Path) -> str:
        """Return an argument in this checkout's words: renamed if this checkout lists the new field or value."""
        for old, new in RENAMED.items():
            field, _, value = new.partition("=")
            if old == argument and field not in self.fields(cwd) and "." not in field:  # an option of the command
                return new if field in self.run(["-m", "paragan", "train", "--help"], cwd, 60) else argument
            if value:
                if argument == old and value in self.fields(cwd).get(field, "").split():
                    return new
            elif re.match(re.escape(old) + r"(?=[.=]|$)", argument) and self.has_field(field, cwd):
                return new + argument[len(old) :]
        return argument

    def has_field(self, field: str, cwd: Path) -> bool:
        """Return whether a field, or one below it, can be set."""
        return any(name == field or name.startswith(f"{field}.") for name in self.fields(cwd))

    def play(self, commands: Sequence[str], timeout_s: float, *, extra: Sequence[str] = (), translate: bool) -> Result:
        """Run the commands of a case in a temporary folder and return what they leave.

        extra: more arguments of `train` commands;  translate: rename arguments as RENAMED says
        """
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="bit_equality-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            write_dataset(folder / DATASET)
            error = ""
            try:
                for command in commands:
                    arguments = shlex.split(command)
                    if arguments[0] == "train":
                        arguments = [*arguments[:2], *COMMON, *arguments[2:], *extra]
                    if translate:
                        arguments = [self.translate(argument, folder) for argument in arguments]
                    remaining_s = timeout_s - (time.monotonic() - started)
                    self.run(["-m", "paragan", *arguments], folder, remaining_s)
            except RuntimeError as failure:
                error = str(failure)
            return Result(time.monotonic() - started, tensors_in(folder), numbers_in(folder), error)


def tail(output: str, lines: int = 15) -> str:
    return "\n".join(output.strip().splitlines()[-lines:])


def write_dataset(path: Path) -> None:
    """Write 96 colour images of 32 x 32 px in three classes of different size: a pattern of the class, and noise."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), (48, 30, 18))
    coarse = rng.integers(0, 160, (3, 4, 4, 3))[labels] + rng.integers(0, 96, (96, 4, 4, 3))
    images = coarse.repeat(8, 1).repeat(8, 2).astype(np.uint8)  # [N, H, W, C]
    order = rng.permutation(96)
    np.savez(path, images=images[order], labels=labels[order])


# Comparing ------------------------------------------------------------------------------------------------------------


def unmatched(mine: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the tensors of one side, "file:name dtype [shape]", whose value the other side does not have."""
    left = Counter(others.values())
    names = []
    for name, digest in mine.items():
        if left[digest]:
            left[digest] -= 1
        else:
            names.append(f"{name} {digest.rpartition(' ')[0]}")
    return names


def same_number(a: float, b: float) -> bool:
    """Return whether two numbers are equal, or both NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))


def compare_numbers(reference: Result, current: Result) -> tuple[list[str], list[str]]:
    """Return the differences between the statistics of two results, and notes about keys that only one side has."""
    differences: list[str] = []
    only_reference = set[str]()
    only_current = set[str]()
    reference_files, current_files = list(reference.numbers.items()), list(current.numbers.items())
    if [len(lines) for _, lines in reference_files] != [len(lines) for _, lines in current_files]:
        sizes = [
            ", ".join(f"{file}: {len(lines)}" for file, lines in files) for files in (reference_files, current_files)
        ]
        differences.append(f"lines of statistics: reference ({sizes[0]}), current ({sizes[1]})")
    for (_, old_lines), (file, new_lines) in zip(reference_files, current_files):
        for number, (old, new) in enumerate(zip(old_lines, new_lines), start=1):
            only_reference |= old.keys() - new.keys()
            only_current |= new.keys() - old.keys()
            for key in (k for k in old if k in new):
                if not same_number(old[key], new[key]):
                    differences.append(f"{file}:{number} {key}: reference {old[key]!r}, current {new[key]!r}")
    sides = (("reference", only_reference), ("current", only_current))
    return differences, [f"keys only of the {side}: {', '.join(sorted(keys))}" for side, keys in sides if keys]


# Arrays that the reference does not write yet: no parameter, buffer or sample.
ADDED_ARRAYS = ("samples.npz:classes",)  # the names of the classes


def compare(reference: Result, current: Result) -> tuple[list[str], list[str]]:
    """Return what differs between two results of a case, and notes."""
    errors = [f"{side}: {r.error}" for side, r in (("reference", reference), ("current", current)) if r.error]
    if errors:
        return errors, []
    if not reference.tensors or not reference.numbers:
        return ["the reference wrote no tensors or no statistics"], []
    old = reference.tensors
    new = current.tensors
    differences, notes = compare_numbers(reference, current)
    only_old = unmatched(old, new)
    only_new = [text for text in unmatched(new, old) if not text.startswith(ADDED_ARRAYS)]
    notes += [f"only current, as intended: {name}" for name in new if name in ADDED_ARRAYS]
    if not (only_old or only_new):
        swapped = [name for name in old if name in new and old[name] != new[name]]
        notes += [f"the value of {name} has another name on the other side" for name in swapped]
    return [*(f"only reference: {t}" for t in only_old), *(f"only current: {t}" for t in only_new), *differences], notes


# The reference's results in a file ------------------------------------------------------------------------------------


class Cache:
    """Results of the reference in a JSON file, or in none."""

    def __init__(self, path: Path | None, checkout: Checkout):
        self.path = path
        self.origin = f"{checkout.source_digest()}, torch {importlib.metadata.version('torch')}, {processor()}"
        self.results: dict[str, dict[str, Any]] = {}
        if path and path.exists():
            data = json.loads(path.read_text("utf-8"))
            if data["origin"] == self.origin:
                self.results = data["results"]
            else:
                print(f"{path} is of another reference or machine: it is replaced", flush=True)

    def get(self, case: Case) -> Result | None:
        result = self.results.get(f"{case.name} {case.key}")
        return Result(**result) if result else None

    def put(self, case: Case, result: Result) -> None:
        """Keep a result, and write the file."""
        if self.path and not result.error:
            self.results[f"{case.name} {case.key}"] = dataclasses.asdict(result)
            unfinished = self.path.with_name(f"{self.path.name}.new")
            unfinished.write_text(json.dumps({"origin": self.origin, "results": self.results}), "utf-8")
            unfinished.replace(self.path)


def processor() -> str:
    """Name the processor: which kernels run, and so how sums are rounded, depends on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return f"{platform.machine()} {hashlib.sha256(repr(features).encode()).hexdigest()[:16]}"


# The command ----------------------------------------------------------------------------------------------------------


def main() -> int:
    options = parser().parse_args()
    cases = select_cases(options.cases)
    if options.list:
        for c in cases:
            print(f"{c.name}\n    " + "\n    ".join(c.commands))
        return 0
    if options.reference is None:
        sys.exit("bit_equality: --reference FOLDER is missing: a checkout of the code before the change")
    sides = Checkout(options.reference, options.python), Checkout(options.current, options.python)
    with tempfile.TemporaryDirectory() as name:
        for side in sides:
            side.check_imported(Path(name))
    return check(cases, *sides, Cache(options.cache, sides[0]), options)


def check(cases: Sequence[Case], before: Checkout, after: Checkout, cache: Cache, options: argparse.Namespace) -> int:
    """Run the cases and print a table; return the exit status."""
    extra = [options.perturb] if options.perturb else []

    def play(case: Case) -> tuple[Result | None, Result, Result]:
        cached = cache.get(case)
        reference = cached or before.play(case.commands, options.timeout, translate=True)
        commands = case.current or case.commands
        translate = not case.current
        return cached, reference, after.play(commands, options.timeout, extra=extra, translate=translate)

    print(f"{'case':<22}{'reference s':>12}{'current s':>11}{'tensors':>9}{'numbers':>9}  result", flush=True)
    different: list[str] = []
    current_s = 0.0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for c, (cached, reference, current) in zip(cases, pool.map(play, cases)):
            if not cached:
                cache.put(c, reference)
            differences, notes = compare(reference, current)
            current_s += current.seconds
            reference_s = "cached" if cached else f"{reference.seconds:.1f}"
            numbers = sum(len(line) for lines in current.numbers.values() for line in lines)
            result = f"DIFFERS ({len(differences)})" if differences else "equal"
            row = (
                f"{c.name:<22}{reference_s:>12}{current.seconds:>11.1f}{len(current.tensors):>9}{numbers:>9}  {result}"
            )
            print("\n".join([row, *indented(differences, options.show), *indented(notes, options.show)]), flush=True)
            if differences:
                different.append(c.name)
    print(f"{len(cases) - len(different)} of {len(cases)} cases are equal; current side: {current_s:.0f} s")
    if different:
        print(f"different: {','.join(different)}")
    return 1 if different else 0


def indented(lines: Sequence[str], most: int) -> list[str]:
    output = [f"    {line}".replace("\n", "\n        ") for line in lines[:most]]
    return [*output, f"    ... and {len(lines) - most} more (--show)"] if len(lines) > most else output


def select_cases(names: str) -> list[Case]:
    """Return the cases of a comma-separated list, or all of them."""
    known = {c.name: c for c in CASES}
    selected = [name for name in names.split(",") if name]
    if unknown := [name for name in selected if name not in known]:
        sys.exit(f"bit_equality: --cases {','.join(unknown)}: there are {', '.join(known)}")
    return [known[name] for name in selected] or list(CASES)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    this_file = Path(__file__).resolve()
    root = next((folder for folder in this_file.parents if (folder / "paragan").is_dir()), Path.cwd())
    p.add_argument("--reference", type=Path, metavar="FOLDER", help="checkout of the code before the change")
    p.add_argument("--current", type=Path, metavar="FOLDER", default=root, help="checkout to compare (this one)")
    p.add_argument("--cache", type=Path, metavar="FILE", help="JSON file that keeps the results of the reference")
    p.add_argument("--cases", default="", metavar="A,B", help="only these cases")
    p.add_argument("--list", action="store_true", help="print the cases and their commands, run nothing")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="cases that run at the same time (1)")
    p.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for one case on one side (600)")
    p.add_argument("--show", type=int, default=12, metavar="N", help="differences printed for each case (12)")
    p.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter for both checkouts (this one)")
    p.add_argument("--perturb", default="", metavar="ARGUMENT", help="add an argument on the current side: a self-test")
    return p


if __name__ == "__main__":
    sys.exit(main())
