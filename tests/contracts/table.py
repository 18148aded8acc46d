"""Settings of every strategy, as on the command line. A new strategy adds a row and inherits all contracts."""

STRATEGIES = {
    "sync": ("strategy=sync",),
    "sync simultaneous": ("strategy=sync", "strategy.order=simultaneous"),
    "sync int4": ("strategy=sync", "strategy.wire=int4"),
    "sync, user wire": ("strategy=sync", "strategy.wire=examples.own_wire:Ternary"),
    "quantized": ("strategy=quantized",),
    "DQGAN sign": ("strategy=DQGAN", "strategy.wire=sign"),
    "CPOAdam": ("strategy=CPOAdam",),
    "CPOAdam-GQ": ("strategy=CPOAdam-GQ",),
    "sync, own gradients between": ("strategy=sync", "strategy.sync_period=2", "strategy.sync_mode=gradients"),
    "sync, accumulated": ("strategy=sync", "strategy.sync_period=2", "strategy.sync_mode=accumulate"),
    "sync, sharded": ("strategy=sync", "strategy.shard_optimizer=true"),
    "sync every 2": ("strategy=sync", "strategy.sync_period=2", "strategy.wire=int8"),
    "sync, Nesterov": ("strategy=sync", "strategy.sync_period=2", "strategy.outer=nesterov"),
    "quantized, Nesterov": ("strategy=quantized", "strategy.sync_period=2", "strategy.outer=nesterov"),
    "sync, streaming": ("strategy=sync", "strategy.sync_period=2", "strategy.fragments=2", "strategy.outer=nesterov"),
    "sync, delayed int8": (
        *("strategy=sync", "strategy.sync_period=3", "strategy.fragments=2", "strategy.delay=2"),
        "strategy.wire=int8",
    ),
    "sync, sparse": (
        *("strategy=sync", "strategy.sync_period=2", "strategy.feedback=0.95"),
        *("strategy.wire=topk", "strategy.wire.fraction=0.1", "strategy.wire.bits=2"),
    ),
    "async": ("strategy=async", "strategy.split=none"),
    "async teams": ("strategy=async",),
    "async teams int8": ("strategy=async", "strategy.wire=int8", "strategy.snapshot_wire=bf16", "g_batch=32"),
    "async, lags and replay": (
        *(
            "strategy=async",
            "strategy.fake_lags=[2,1,0,3]",
            "strategy.critic_lags=[0,2]",
            "strategy.replay_policy=replay",
        ),
        *("strategy.replay_policy.fraction=0.5", "strategy.replay_policy.window=3"),
    ),
    "per-label, ranks of a label": ("strategy=per-label", "strategy.per_label_strategy.wire=int8"),
    "gossip": ("strategy=gossip",),
    "gossip int8": ("strategy=gossip", "strategy.wire=int8", "strategy.topology=ring", "strategy.rounds=2"),
    "DPOSG": ("strategy=DPOSG",),
    "Rand-DP-OAdam": ("strategy=Rand-DP-OAdam",),
}

# One of every kind: contracts that take long are checked for these by `make test`, for all by `make test-all`.
REPRESENTATIVES = (
    *("sync", "sync int4", "quantized", "sync, sharded", "sync, delayed int8"),
    *("async teams int8", "async, lags and replay", "per-label, ranks of a label", "gossip int8"),
)

# Strategies whose ranks together equal one rank: their wire is exact and no rank extrapolates locally.
RANK_COUNT_INVARIANT = ("sync", "sync simultaneous", "CPOAdam", "async", "async teams", "async, lags and replay")

# Strategies whose ranks hold different parameters, which agree only in the long run.
UNREPLICATED = (
    *("sync every 2", "sync, own gradients between", "sync, Nesterov", "quantized, Nesterov", "sync, streaming"),
    *("sync, delayed int8", "sync, sparse", "gossip", "gossip int8", "DPOSG", "Rand-DP-OAdam"),
)

# Strategies that can play a broken round again, without the rank whose loss broke it.
REPLAYING = (
    *("sync", "sync simultaneous", "sync int4", "sync, user wire", "sync every 2", "sync, Nesterov"),
    *("quantized", "DQGAN sign", "CPOAdam", "CPOAdam-GQ"),
)

# Objectives and settings under which the contracts hold, too.
VARIANTS = {
    "plain": (),
    "r1": ("objective.r1=1", "objective.loss=nonsaturating"),
    "gp": ("objective.gp=10", "objective.loss=wasserstein", "d_steps=2", "nets.batch_norm=false"),
    "clip": ("objective.clip=0.01", "objective.loss=wasserstein", "nets.spectral=false"),
    "pairs": ("objective.loss=relativistic", "objective.r1=1", "objective.r2=1"),
    "kept": (
        *("objective.augment=ada", "objective.augment.kimg=0.1", "objective.lecam=0.3", "objective.bcr=10"),
        "device.concat_real_fake=true",
    ),
    "clipped, in groups": (
        *("g.max_norm=0.1", "d.max_norm=0.1", "d.schedule=exponential", "d.lr_half_life_kimg=0.05"),
        "g.groups=[{pattern: 'start.*', lr_factor: 0.5}, {pattern: 'norms.*', weight_decay: 0.1}]",
        *("d.groups=[{pattern: 'body.0.*', lr_factor: 0.5}]", "d.optimizer.weight_decay=0.1"),
        "d.decay_norms_and_biases=false",
    ),
    "unconditional": ("data.labels=false",),
    "lane by lane": ("device.lanes_per_pass=1",),
}
