"""Advice on a run's settings, of commands and of runs that are there: followed, it leads to a command that is accepted.

The arguments of a case are refused with a line that contains its advice. Each string of `follow` then changes the
arguments as the advice says, `~word` removing those that begin with `word` or `--word`; the command must be accepted.
"""

from __future__ import annotations

import shutil

import pytest

from advice import ROOT, Case, case_id, followed_advice, messages_with_advice, missing_tests
from processes import TINY_RUN_ARGS, run_cli, usage_error

SMALL = "--nets.width=8 --nets.spectral=false"  # its power iteration would take most of the time of a dry run

# digits: a run of images of 8 px with 10 classes ------------------------------------------------------------------

DIGITS = ["train", *TINY_RUN_ARGS, "-n", "--nets.spectral=false"]
DIGITS_CASES = [
    Case("--batch=30 --lanes=8", "Use --batch 24 or 32, or --lanes 6", ("--batch=24", "--batch=32", "--lanes=6")),
    Case("--batch=1", "Use --batch 2 or 4, or --lanes 1", ("--batch=2", "--batch=4", "--lanes=1")),
    Case("--g_batch=7", "Use --g_batch 6 or 8", ("--g_batch=6", "--g_batch=8")),
    Case("--ranks=3", "Start at most 2 ranks", ("--ranks=2",)),
    Case("--ranks=0", "--ranks 0: must be positive. Use 1 or more", ("--ranks=1",)),
    Case("--ramp=8:17", "Use 16 or 18", ("~ramp --ramp=8:16", "~ramp --ramp=8:18")),
    Case("--device.kind=mps", "Use --device.kind=cpu", ("--device.kind=cpu",)),
    Case("--workers=1", "did you mean data.prefetch.workers?", ("~workers --data.prefetch.workers=1",)),
    Case("--nets.widht=8", "did you mean nets.width?", ("~nets.widht --nets.width=8",)),
    Case("--g.optimizer.betas=0.5", "g.optimizer.betas=[0.5]", ()),
    Case(
        "--strategy=quantized --strategy.sync_period=2 --strategy.paper_update=true",
        "Use strategy.sync_period=1 or strategy.paper_update=false.",
        ("--strategy.sync_period=1", "--strategy.paper_update=false"),
    ),
    Case(
        "--strategy=async --objective.zcr=1",
        "Use objective.zcr=0 and objective.zcr_g=0, or --strategy sync",
        ("--objective.zcr=0 --objective.zcr_g=0", "--strategy=sync"),
    ),
    Case(
        "--strategy=gossip --strategy.topology=hypercube --ranks=3 --lanes=4 --batch=12",
        "Use ring, torus, exponential, one-peer, complete, star, matching, random-ring",
        tuple(
            f"--strategy.topology={name}"
            for name in ("ring", "torus", "exponential", "one-peer", "complete", "star", "matching", "random-ring")
        ),
    ),
    Case(
        "--strategy=gossip --strategy.peer_timeout_s=0.1",
        "strategy.peer_timeout_s=0.1: too short to tell a slow rank from a lost one. "
        "Use 1 or more, or 0 to end the run with the first lost rank.",
        ("--strategy.peer_timeout_s=1", "--strategy.peer_timeout_s=0"),
    ),
    Case(
        "--strategy.min_ranks=1",
        "strategy.min_ranks=1: has no effect with strategy.peer_timeout_s=0. Use --strategy.peer_timeout_s=10, or "
        "--strategy.min_ranks=2.",
        ("--strategy.peer_timeout_s=10", "--strategy.min_ranks=2"),
    ),
    Case(
        "--strategy.peer_timeout_s=5 --strategy.sync_period=2 --strategy.sync_mode=gradients",
        "strategy.peer_timeout_s=5: does not work with strategy.sync_mode=gradients. Use --strategy.peer_timeout_s=0, "
        "or leave --strategy.sync_mode out.",
        ("--strategy.peer_timeout_s=0", "~strategy.sync_mode"),
    ),
    Case(
        "--strategy.peer_timeout_s=5 --run-dir=s3://bucket/run",
        "--run-dir s3://bucket/run: ranks that come and go share a folder. Use one on a shared disk, or "
        "--strategy.peer_timeout_s=0",
        ("~run-dir", "--strategy.peer_timeout_s=0"),
    ),
    Case(
        "--strategy=per-label --strategy.per_label_strategy.peer_timeout_s=5",
        "strategy.per_label_strategy.peer_timeout_s=5: the ranks of a label end with the first lost one. Use "
        "--strategy.per_label_strategy.peer_timeout_s=0.",
        ("--strategy.per_label_strategy.peer_timeout_s=0",),
    ),
    Case(
        "--strategy=async-gossip --ranks=4 --lanes=4 --strategy.topology=one-peer",
        "strategy.topology=one-peer: changes or is directed, and strategy.staleness=16 needs links that stay. "
        "Use ring or torus or hypercube or complete or star.",
        tuple(f"--strategy.topology={name}" for name in ("ring", "torus", "hypercube", "complete", "star")),
    ),
    Case(
        "--strategy=gossip --ranks=2 --on_divergence=rollback",
        "Use --strategy.peer_timeout_s=0.",
        ("--strategy.peer_timeout_s=0",),
    ),
    Case(
        "--strategy=per-label --strategy.ranks_per_label=4",
        "Use --strategy.ranks_per_label=1 or less, or start more ranks.",
        ("--strategy.ranks_per_label=1", "--ranks=4 --lanes=4"),
    ),
    Case(
        "--strategy=per-label --objective.classifier=1",
        "objective.classifier: teaches D labels, and under --strategy per-label each D sees one. "
        "Use objective.classifier=0",
        ("--objective.classifier=0",),
    ),
    Case(
        "--strategy=per-label --strategy.ranks_per_label=3 --ranks=4",
        "--lanes 2: 4 ranks of a label cannot share them. Use --lanes 4 --batch 4 or more, or at most 2 ranks",
        ("--lanes=4", "--ranks=2 --strategy.ranks_per_label=2"),
    ),
    Case(
        "--strategy.sync_mode=gradients",
        "strategy.sync_mode=gradients: has no effect with strategy.sync_period=1. Use --strategy.sync_period=2 or "
        "more, or --strategy.sync_mode=parameters.",
        ("--strategy.sync_period=2", "--strategy.sync_mode=parameters"),
    ),
    Case(
        "--strategy.sync_period=9 --strategy.sync_mode=accumulate --kimg=0.064",
        "strategy.sync_period=9: with strategy.sync_mode=accumulate optimizers step after every period, and the "
        "run has 4 rounds. Use --strategy.sync_period=4 or less, or a larger --kimg.",
        ("--strategy.sync_period=4", "--kimg=0.144"),
    ),
    Case("--strategy=per-label --kimg=0.01", "Use --kimg 0.16 or more", ("--kimg=0.16",)),
    Case(
        f"--objective.contrastive=1 --nets=contragan {SMALL} --data.resolution=32 --batch=2",
        "and with --batch 2 and --lanes 2 there is one. Use --lanes 1, or a larger batch",
        ("--lanes=1", "--batch=4"),
    ),
    Case("--objective.contrastive=1", "or objective.contrastive=0", ("--objective.contrastive=0",)),
    Case(
        "--objective.classifier=1",
        "Use --nets.d_conditioning=classifier if the networks have it, or objective.classifier=0.",
        ("--nets.d_conditioning=classifier", "--objective.classifier=0"),
    ),
    Case(
        "--objective.classifier=1 --data.labels=false",
        "objective.classifier: needs labels, and there are none, or --data.labels=false hides them. "
        "Use objective.classifier=0",
        ("--objective.classifier=0", "--data.labels=true --nets.d_conditioning=classifier"),
    ),
    Case("--nets.d_conditioning=classifier", "Use --objective.classifier=1", ("--objective.classifier=1",)),
    Case("--nets.d_conditioning=contrastive", "Use --objective.contrastive=1", ("--objective.contrastive=1",)),
    Case(
        "--objective.gp=10 --nets.batch_norm=true",
        "Use a D without batch norm (--nets.batch_norm=false), or objective.gp=0.",
        ("--nets.batch_norm=false", "--objective.gp=0"),
    ),
    Case(
        "--objective.clip=0.01 --nets.spectral=true",
        "Use a D without it (--nets.spectral=false), or objective.clip=0.",
        ("--nets.spectral=false", "--objective.clip=0"),
    ),
    Case(
        "--objective.clip=0.01 --objective.gp=10",
        "Use objective.gp=0, or objective.clip=0",
        ("--objective.gp=0", "--objective.clip=0"),
    ),
    Case("--objective.cr=1 --objective.bcr=1", "Set one of them to 0", ("--objective.cr=0", "--objective.bcr=0")),
    Case(
        "--objective.augment=ada --objective.loss=wasserstein",
        "Use objective.loss=hinge or nonsaturating, or objective.augment=diffaugment",
        ("--objective.loss=hinge", "--objective.loss=nonsaturating", "--objective.augment=diffaugment"),
    ),
    Case(
        "--objective.classifier=1 --objective.contrastive=1",
        "Set one of them to 0",
        (
            "--objective.classifier=0 --nets.d_conditioning=contrastive",
            "--objective.contrastive=0 --nets.d_conditioning=classifier",
        ),
    ),
    Case("--data.only=10", "Use a number from 0 to 9", ("--data.only=0", "--data.only=9")),
    Case(
        "--policy=foo",
        "--policy=foo: there is no policy foo. Use ttur, biggan, sngan, paragan, optimistic, wcgan, wcgan-gp, dcgan, "
        "dposg, dqgan",
        tuple(
            f"--policy={name}"
            for name in [
                "ttur",
                "biggan",
                "sngan",
                "paragan",
                "optimistic",
                "wcgan",
                "wcgan-gp",
                "dcgan",
                "dposg",
                "dqgan",
                "none",
            ]
        ),
    ),
    Case("--evaluation.metrics=[fid]", "Use fd", ("--evaluation.metrics=[fd]",)),
    Case(
        "--evaluation.metrics=[is]",
        "Use fd, kid or prdc, or --features inception or resnet20",
        (
            "--evaluation.metrics=[fd]",
            "--evaluation.metrics=[kid]",
            "--evaluation.metrics=[prdc]",
            "--evaluation.features=resnet20 --evaluation.count=100",
        ),
    ),
    Case("--evaluation.features=values", "Use pixels", ("--evaluation.features=pixels",)),
    Case("--output.best_metric=kid", "Use one of: fd_pixels", ("--output.best_metric=fd_pixels",)),
    Case(
        "--strategy=quantized --strategy.paper_update=true --g.optimizer=adabelief",
        "Use --g.optimizer=sgd, or --strategy.paper_update=false.",
        ("--g.optimizer=sgd", "--strategy.paper_update=false"),
    ),
    Case(
        "--strategy=DPOSG --g.optimizer=sgd --g.optimizer.momentum=0.9",
        "Use --g.optimizer.momentum=0, or --strategy.paper_update=false.",
        ("--g.optimizer.momentum=0", "--strategy.paper_update=false"),
    ),
    Case(
        "--strategy=quantized --strategy.paper_update=true --d.optimizer_wrapper=optimistic",
        "Use --d.optimizer_wrapper=none.",
        ("--d.optimizer_wrapper=none",),
    ),
    Case("--g.optimizer_wrapper=none --g.extrapolation=3", "Use --g.extrapolation=null.", ("--g.extrapolation=null",)),
    Case(
        "--strategy=per-label --distill_from=LABELS --data=DIR/two.npz",
        "distill_from=LABELS: is for one generator, and --strategy per-label has several. Leave one of them out.",
        ("~distill_from", "~strategy"),
    ),
    Case(
        "--on-divergence=rollback --health=off",
        "Use --health=on, or --on-divergence=none.",
        ("--health=on", "--on-divergence=none"),
    ),
    Case(
        "--ramp=1:32 --strategy=async",
        "--ramp 1:32: --strategy async needs rounds of one size. Leave one of them out",
        ("~ramp", "~strategy"),
    ),
    Case("--ramp=1:32 --objective.augment=ada", "steps of one size. Leave one of them out", ("~ramp", "~objective")),
    Case("--ramp=2:32,1:64", "as in 100:128,400:256", ("--ramp=100:128,400:256",)),
    Case(
        "--strategy=async-gossip --strategy.rounds=2 --ranks=2",
        "strategy.staleness=16: does not work with strategy.rounds. Leave one of them out.",
        ("~strategy.rounds", "--strategy.staleness=0"),
    ),
    Case("--strategy=async --strategy.fake_lags=1", "strategy.fake_lags=[1]", ("--strategy.fake_lags=[1]",)),
    Case("--policy=paragan --batch-scaling=rates", "Leave --batch-scaling rates out", ("~batch-scaling",)),
    Case(
        "--policy=paragan --strategy=quantized --strategy.paper_update=true",
        "Leave --policy out, or set --g.optimizer=sgd and --d.optimizer=sgd",
        ("~policy", "--g.optimizer=sgd --d.optimizer=sgd"),
    ),
    Case("seed=1", "Set fields as --some.field=value", ("~seed --seed=1",)),
    Case("--init_from=DIR/no --nets.spectral=true", "Use a run folder", ("--init_from=RUN",)),
    Case("--distill_from=RUN", "Use a run of --strategy per-label", ()),
    Case(
        "--distill_from=LABELS --data=DIR/two.npz --data.labels=false",
        "Use --data.labels=true",
        ("--data.labels=true",),
    ),
    Case("--distill_from=LABELS --data=DIR/two.npz --data.resolution=16", "Use 8", ("--data.resolution=8",)),
]


@pytest.mark.slow(after=8)
@pytest.mark.parametrize("case", DIGITS_CASES, ids=case_id)
def test_advice_on_a_run_of_digits_works(case, check_advice):
    check_advice(case, DIGITS)


# images of 32 px with and without classes -------------------------------------------------------------------------

FOLDER = [
    *("train", "folder", "-n", "--nets=sngan", "--nets.width=8", "--nets.d_width=8", "--batch=16", "--lanes=2"),
    *("--evaluation.metrics=[]", "--objective.r1=0", "--nets.spectral=false"),
]
FOLDER_CASES = [
    Case(
        f"--data=DIR/classes.npz --nets=biggan {SMALL} --nets.latent=7",
        "Use 4 or 80",
        ("--nets.latent=4", "--nets.latent=80"),
    ),
    Case(
        f"--data=DIR/classes.npz --nets=sagan {SMALL} --nets.attention=5",
        "must be 16 or 8 (short side of the maps, pixels) for images of 32 px, or 0 for none. Use 16",
        ("--nets.attention=16", "--nets.attention=8", "--nets.attention=0"),
    ),
    Case(
        "--data=DIR/classes.npz --nets.g_conditioning=none",
        "Use nets.g_conditioning=auto, or --data.labels=false to ignore the classes",
        ("--nets.g_conditioning=auto", "--data.labels=false"),
    ),
    Case(
        "--data=DIR/plain.npz --nets.d_conditioning=projection",
        "Use nets.d_conditioning=auto",
        ("--nets.d_conditioning=auto",),
    ),
    Case(
        "--data=DIR/folder/a/1.png",
        "data: DIR/folder/a/1.png is one image. Give its folder, DIR/folder/a",
        ("--data=DIR/folder/a",),
    ),
    Case("--data=DIR/clases.npz", "did you mean classes.npz", ("--data=DIR/classes.npz",)),
    Case("--data=DIR/fold", "did you mean folder?", ("--data=DIR/folder --batch=4",)),
    Case("--data=DIR/numbers.npz", "Use networks of your own, --nets=module:Class", ()),
    Case(
        "--data=DIR/floats.npy",
        "if they are images, store them with np.savez('images.npz', images=x)",
        ("--data=DIR/floats.npz",),
    ),
    Case("--data=RUN", "Use its samples: `paragan sample RUN --count 5000 --out fakes.npz`", ()),
    Case("DIR/folder", "Use --data DIR/folder", ("~DIR --data=DIR/folder --batch=4",)),
    Case(
        "--data=DIR/plain.npz --strategy=per-label",
        "Use PATH/<class>/*.png, or an .npz with labels",
        ("--data=DIR/folder --batch=4", "--data=DIR/classes.npz"),
    ),
    Case("", "folder needs --data D", ("--data=DIR/folder --batch=4", "--data=DIR/classes.npz", "--data=digits")),
]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("case", FOLDER_CASES, ids=case_id)
def test_advice_on_a_run_of_images_works(case, check_advice):
    check_advice(case, FOLDER)


# other commands ---------------------------------------------------------------------------------------------------

OWN_NETS = "--nets=examples.mixture:Nets -n --batch=16 --lanes=2 --evaluation.metrics=[]"
COMMAND_CASES = [
    Case("train", "Use `paragan train digits`, or see `paragan recipes`", ("digits -n",)),
    Case("train DIR/folder -n --batch=4 --lanes=2", "Use `paragan train folder --data DIR/folder`", ()),
    Case("train --data=DIR/folder -n --batch=4 --lanes=2", "Use `paragan train folder --data DIR/folder`", ()),
    Case(
        f"train custom --data=DIR/numbers.npz {OWN_NETS} --mirror",
        "--mirror: flips images, and the data are arrays. Leave it out.",
        ("~mirror",),
    ),
    Case(
        f"train custom --data=DIR/numbers.npz {OWN_NETS} --objective.cr=1",
        "objective.cr=1.0: transforms images, and the data are arrays. Use objective.cr=0.",
        ("--objective.cr=0",),
    ),
    Case(
        "train digits -n --lr=1e-4",
        "did you mean g.optimizer.lr or d.optimizer.lr or strategy.outer.lr?",
        ("~lr --g.optimizer.lr=1e-4",),
    ),
    Case(
        "train digits -n --resume=RUN --run-dir=NEW/x",
        "--resume PATH: --run-dir names a run folder too. Use one of them",
        ("~resume", "~run-dir"),
    ),
    Case(
        "train folder -n --data=DIR/classes.npz --nets=r3gan --nets.width=10 --batch=4 --lanes=2",
        "Use 8",
        ("--nets.width=8",),
    ),
    Case("train digits -n --device=cpu", "Set one of device.kind, ", ("~device --device.kind=cpu",)),
    Case("eval COPY --metrics=foo", "did you mean fd?", ("--metrics=fd",)),
    Case("eval COPY --metrics=fid", "or score fd, which needs no file", ("--metrics=fd",)),
    Case("eval COPY --truncation=2", "Use a number between 0.05 and 1 (1: no truncation)", ("--truncation=1",)),
    Case("eval COPY --truncation=x", "Use 0.5 or 0.4,0.6,1", ("--truncation=0.5", "--truncation=0.4,0.6,1")),
    Case("eval COPY --seed=-1", "Use 0 to 2^63 - 1", ("--seed=0", f"--seed={2**63 - 1}")),
    Case("eval COPY --follow --seed=3", "Leave --truncation and --seed out", ("~seed",)),
    Case(
        "eval COPY --follow --patience=-1",
        "--patience -1.0: must not be negative. Use 0 or more",
        ("--patience=0",),
    ),
    Case(
        "eval COPY --follow --ranks=2",
        "--follow: runs as one process. Start it without a launcher and without --ranks",
        ("~ranks",),
    ),
    Case("eval COPY --inception=W --features=pixels", "Leave it out, or use --features inception", ("~inception",)),
    Case("eval COPY --features=pixel", "did you mean pixels?", ("--features=pixels",)),
    Case("eval COPY --metrics=prdc --count=3", "needs at least 7 images", ("--count=7",)),
    Case(
        "eval COPY --reference=NEW/stats.npz",
        "Use `paragan data stats PATH --out NEW/stats.npz` to write it",
        (),  # test_statistics_are_written_as_advised
    ),
    Case(
        "eval",
        "RUN_DIR: is missing. Use a run folder, or --reals A --fakes B for two sets of images",
        ("COPY --metrics=fd", "--reals=digits --fakes=digits --metrics=fd"),
    ),
    Case(
        "eval --fakes=digits --metrics=fd",
        "--fakes: there is no --reals. Use --reals A --fakes B",
        ("--reals=digits",),
    ),
    Case(
        "eval --reals=digits --metrics=fd",
        "--reals digits: there is no --fakes. Use --reals A --fakes B",
        ("--fakes=digits",),
    ),
    Case(
        "eval COPY --resolution=8 --metrics=fd",
        "--resolution: is for two sets of images. Use it with --reals A --fakes B and no RUN_DIR",
        ("~COPY --reals=digits --fakes=digits",),
    ),
    Case(
        "eval COPY --reals=digits --fakes=digits --metrics=fd",
        "COPY: is scored without --reals. Use RUN_DIR, or --reals A --fakes B",
        ("~reals ~fakes", "~COPY"),
    ),
    Case(
        "eval --reals=digits --fakes=digits --metrics=fd --count=0",
        "--count 0: must be positive. Use 1 or more",
        ("--count=64",),
    ),
    Case(
        "eval --reals=digits --fakes=digits --metrics=fd --follow",
        "--follow: is for the model of a run. Leave it out with --reals and --fakes",
        ("~follow",),
    ),
    Case(
        "eval --reals=digits --fakes=DIR/folder --metrics=kid",
        "Use --resolution 8, which crops",
        ("--resolution=8 --channels=3", "--resolution=8 --channels=1"),
    ),
    Case("eval --reals=digits --fakes=DIR/folder", "Use fd,kid, or", ("--metrics=kid --resolution=8 --channels=1",)),
    Case("eval --reals=DIR/classes.npz --fakes=DIR/plain.npz --metrics=intra_fd", "Use fd, kid", ("--metrics=kid",)),
    Case("eval --reals=digits --fakes=digits --metrics=fd --count=9999", "Use count=1797", ("--count=1797",)),
    Case("eval --reals=digits --fakes=digits --metrics=fid", "or score fd, which needs no file", ("--metrics=fd",)),
    Case("eval --reals=digits --fakes=digits --metrics=fd --features=values", "Use pixels", ("--features=pixels",)),
    Case("eval --reals=DIR/numbers.npz --fakes=digits --metrics=fd", "sets of one kind", ("--fakes=DIR/numbers.npz",)),
    Case(
        "eval COPY/model",
        "--data: COPY/model is a model without its run. Use --data PATH to say what it is scored against",
        ("--data=digits --metrics=fd",),
    ),
    Case("sample RUN --out=NEW/a.npz --count=0", "--count 0: must be positive. Use 1 or more", ("--count=1",)),
    Case(
        "sample RUN --out=NEW/a.npz --truncation=3",
        "--truncation 3.0: out of range. Use a number between 0.05 and 1 (1: no truncation)",
        ("--truncation=0.05",),
    ),
    Case("sample RUN --out=NEW/a.npz --labels=12", "Use 0 to 9", ("--labels=0", "--labels=9")),
    Case("sample RUN --out=NEW/a.npz --seed=-1", "Use 0 to 2^63 - 1", ("--seed=0",)),
    Case("eval COPY --device=gpu", "Use cpu, cuda, cuda:1, xpu or mps", ("--device=cpu",)),
    Case(
        "eval COPY --metrics=fd --device=mps",
        "--device mps: torch finds no Apple GPU on this host. Use --device cpu",
        ("--device=cpu",),
    ),
    Case(
        "sample RUN --out=NEW/a.foo",
        "Use grid.png, samples.npz, or a folder (a name without extension)",
        ("--out=NEW/grid.png", "--out=NEW/samples.npz", "--out=NEW/folder"),
    ),
    Case("sample RUN --out=DIR/folder", "Name a new one", ("--out=NEW/new",)),
    Case("sample RUN", "one of the arguments --out --video is required", ("--out=NEW/a.npz", "--video=NEW/a.gif")),
    Case("sample RUN --video=NEW/a.foo", "Use .mp4, .gif, .webp", ("--video=NEW/a.gif", "--video=NEW/a.webp")),
    Case("sample RUN --video=NEW/a.gif --fps=100", "Use .webp or .mp4", ("--video=NEW/a.webp",)),
    Case(
        "sample RUN --video=NEW/a.webp --seconds=0",
        "--seconds, --fps, --stops: out of range. "
        "Use --seconds above 0 and at most 3600, --fps from 1 to 120, --stops 2 or more",
        ("--seconds=0.5 --fps=1 --stops=2", "--seconds=0.1 --fps=120 --stops=2"),
    ),
    Case(
        "sample RUN --video=NEW/a.webp --seconds=1 --fps=10 --stops=100",
        "Use 2 to 10 (--seconds x --fps)",
        ("--stops=2", "--stops=10"),
    ),
    Case("export RUN", "Use either --out FOLDER|FILE or --push USER/NAME", ("--out=NEW/folder",)),
    Case("export RUN --out=DIR/folder", "Use an empty or a new folder", ("--out=NEW/folder",)),
    Case("export LABELS --out=NEW/a.onnx --format=onnx", "Use a new folder", ("--out=NEW/folder",)),
    Case(
        "export RUN --out=NEW/a.onnx",
        "Use --format onnx, or the name of a folder",
        ("--format=onnx", "--out=NEW/folder"),
    ),
    Case("report RUN --out=NEW/a.txt", "Use a name that ends in .html", ("--out=NEW/a.html",)),
    Case("report RUN RUN --out=NEW/a.html", "Use every folder once", ()),
    Case("eval COPY --follow --data=DIR/small.npz", "Use those, or leave --follow out", ("~data", "~follow")),
    Case(
        "eval --reals DIR/ten_bits.npz --fakes DIR/twelve_bits.npz",
        "Use --range=0:4095 for both",
        ("--range=0:4095", "--range=full"),
    ),
    Case("eval --reals DIR/signed.npz --fakes DIR/twelve_bits.npz", "Use --range=-500:499", ("--range=-500:499",)),
    Case("eval --reals DIR/stats.npz --fakes RUN --metrics=fd", "Use its samples: `paragan sample RUN", ()),
    Case(
        "eval LABELS --follow",
        "--follow: LABELS has a model for every label, which workers score. Leave it out",
        ("~follow",),
    ),
    Case(
        "merge RUN -n",
        "RUN: has one generator for all labels already. Use a run of --strategy per-label",
        ("~RUN LABELS",),
    ),
    Case("merge LABELS --out=LABELS", "Use another folder, or leave --out out", ("--out=NEW/merged",)),
    Case("export RUN --out=NEW/a --format=onnx", "Use a name that ends in .onnx", ("--out=NEW/a.onnx",)),
    Case(
        "bench data --data=DIR/plain.npz --batch=0 --seconds=0.1",
        "--batch, --seconds: out of range. Use --batch 1 or more, --seconds above 0",
        ("--batch=1",),
    ),
    Case("bench step digits --batches=x", "Use 8,16,32", ()),
    Case("bench step digits --batches=7", "Use 16 or 32, or other --lanes", ()),
    Case("data inspect digits --sheet=NEW/a.txt", "Use one such as sheet.png.", ("--sheet=NEW/sheet.png",)),
    Case(
        "data convert DIR/small.npz NEW/a.foo",
        "Use a folder (a name without extension), .npz, .zip, .h5, or --to tars",
        ("~NEW NEW/folder", "~NEW NEW/a.npz", "~NEW NEW/a.zip", "~NEW NEW/a.h5", "~NEW NEW/tars --to tars"),
    ),
    Case(
        "data convert DIR/small.npz NEW/a.zip --resolution=0",
        "such as 64, or 256x128",
        ("--resolution=64", "~NEW/a.zip NEW/b.zip --resolution=256x128"),
    ),
    Case("data convert DIR/small.npz NEW/a.zip --shuffle=-1", "Use 0 or more", ("--shuffle=0",)),
    Case("data convert digits DIR/plain.npz", "name a new one, or remove it first", ("~DIR NEW/new.npz",)),
    Case(
        "data convert DIR/small.npz NEW/tars --to=tars --shard-mb=0",
        "Use 0.001 to 1e6, such as 64.",
        ("--shard-mb=64", "~NEW NEW/large --shard-mb=1e6"),
    ),
    Case("data convert DIR/small.npz NEW/a.npz --format=png", "Leave --format out.", ("~format",)),
    Case("data stats digits --out=NEW/a.txt", "Use one such as stats.npz.", ("--out=NEW/stats.npz",)),
    Case(
        "data index DIR/folder",
        "`paragan data shard DIR/folder TO_FOLDER` makes them",
        ("~index ~DIR shard DIR/folder NEW/tars",),
    ),
]


@pytest.mark.slow(after=20)
@pytest.mark.parametrize("case", COMMAND_CASES, ids=case_id)
def test_advice_of_a_command_works(case, check_advice):
    check_advice(case)


def test_statistics_are_written_as_advised(finished, tmp_path):
    stats = tmp_path / "stats.npz"
    run = shutil.copytree(finished, tmp_path / "run")
    command = ["eval", run, f"--reference={stats}"]
    assert f"Use `paragan data stats PATH --out {stats}` to write it" in usage_error(*command)
    assert run_cli("data", "stats", "digits", "--out", stats).status == 0
    assert run_cli(*command).status == 0


def test_every_piece_of_advice_is_followed_by_a_test():
    """Every message of the program that gives advice has a test that does what it says (tests/advice.py)."""
    missing = missing_tests(messages_with_advice(ROOT / "paragan"), followed_advice(ROOT / "tests"))
    assert missing == []


# runs that are there already --------------------------------------------------------------------------------------

TRAIN = ["train", *TINY_RUN_ARGS]
RUN_CASES = [
    Case(
        "--kimg=0.016 --run-dir=DIR/folder",
        "--run-dir DIR/folder: has files in it but no run.yaml. Use an empty or a new folder",
        ("--run-dir=NEW/new",),
    ),
    Case(
        "--kimg=0.16 --run-dir=COPY --resume=never",
        "--resume never: COPY holds a run already. Use another --run-dir",
        ("--run-dir=NEW/new --kimg=0.016", "~resume"),
    ),
    Case(
        "--kimg=0.16 --run-dir=COPY --nets.width=8",
        "nets.width was 4, is 8. Use its settings, or another --run-dir",
        ("--nets.width=4", "--run-dir=NEW/new --kimg=0.016"),
    ),
    Case(
        "--kimg=0.16 --run-dir=COPY --strategy=auto",
        "Use that, or another --run-dir",
        ("--strategy=sync",),  # another one: test_choose.py
    ),
    Case(
        "--kimg=0.16 --run-dir=COPY --data=DIR/small.npz",
        "Use its settings, or another --run-dir",
        ("--data=digits", "--run-dir=NEW/new --kimg=0.016"),
    ),
    Case(
        "--kimg=0.016 --run-dir=DIR/plain.npz",
        "--run-dir DIR/plain.npz: cannot be written (File exists). Use another --run-dir",
        ("--run-dir=NEW/new",),
    ),
    Case(
        "--kimg=0.016 --outdir=DIR/plain.npz",
        "--outdir DIR/plain.npz: cannot be written (File exists). Use another --outdir",
        ("--outdir=NEW/runs",),
    ),
]


@pytest.mark.parametrize("case", RUN_CASES, ids=case_id)
def test_advice_on_a_run_that_is_there_works(case, check_advice):
    check_advice(case, TRAIN)
