"""Fill in what a run leaves to its data, its device or its strategy.

After `resolve` every field has a value, so that run.yaml repeats the run on another machine. Rollbacks change the run
that is trained (`run_after_rollbacks`), not the one that is recorded.
"""

from __future__ import annotations

import dataclasses

from paragan.config.run import AnyStrategy, Run
from paragan.config.sections import DataOptions
from paragan.config.user_code import check_nets, is_user_defined
from paragan.config.validate import check_labels_available, check_objective, check_objective_for_data
from paragan.core.devices import backend_of, pick_device
from paragan.core.errors import UsageError
from paragan.core.image_encoding import ImageEncoding, is_user_code
from paragan.core.image_shape import ImageSize
from paragan.core.philox import philox_generator
from paragan.data.dataset import Dataset, describe_channels, load_data
from paragan.data.records.decoder import RecordOptions
from paragan.data.storage.filesystem import redact_url
from paragan.data.value_range import AUTO
from paragan.nets import DenoiserConfig, Spec
from paragan.optim.optimizers import SGD, PlayerOptim, with_lr


def make_spec(options: DataOptions, dataset: Dataset) -> Spec:
    """Return what the networks of a run are built for: resolution, channels and classes, or the shape of an array."""
    classes = len(dataset.classes) if options.labels else 0
    if dataset.encoding:
        channels, height, width = dataset.shape
        resolution = ImageSize(width, height).resolution
        return Spec(resolution, channels, classes, image_shape=dataset.encoding.image_shape)
    if dataset.is_array:
        return Spec(0, 0, classes, dataset.shape, dataset.fields, dataset.main_field, dataset.sample_rate)
    channels, _, _ = dataset.shape
    return Spec(dataset.size.resolution, channels, classes, fields=dataset.fields, main_field=dataset.main_field)


def record_options(options: DataOptions) -> RecordOptions:
    """Return what is done to records of several arrays.

    Raises:
        UsageError: `aligned` or `label_pattern` cannot be read.
    """
    aligned: list[tuple[str, int]] = []
    for entry in options.aligned:
        name, _, hop = entry.rpartition(":")
        if not name or not hop.isdecimal() or not int(hop):
            raise UsageError(f"data.aligned={entry}: is not FIELD:SAMPLES. Use one such as mel:256")
        aligned.append((name, int(hop)))
    return RecordOptions(
        options.field,
        options.segment,
        tuple(aligned),
        options.sample_rate,
        options.resample,
        transform=options.transform,
        label_pattern=options.label_pattern,
    )


def load_dataset(options: DataOptions) -> Dataset:
    """Load the data that a run asks for. Raises UsageError if they cannot be read."""
    has_labels = options.labels or options.only is not None
    dataset = load_data(
        options.path,
        resolution=options.resolution or None,
        channels=options.channels or None,
        labels=has_labels and (options.label_key or True),
        cache=options.cache,
        max_bad_fraction=options.max_bad_fraction,
        max_pixels=options.max_pixels or None,
        remote=options.remote,
        value_range=options.range,
        records=record_options(options),
    )
    if dataset.encoding or options.decoder or options.originals:
        dataset = _with_originals(dataset, options)
    return dataset if options.only is None else dataset.only_class(options.only)


def _with_originals(dataset: Dataset, options: DataOptions) -> Dataset:
    """Return latents with the decoder that the options name, and with what opens the images they were made from."""
    encoding = dataset.encoding
    if encoding is None:
        field = "decoder" if options.decoder else "originals"
        raise UsageError(
            f"data.{field}={getattr(options, field)}: is for latents that `paragan data encode` wrote, and "
            f"{options.redacted_path} holds none. Leave it out"
        )
    if options.decoder:
        encoding = dataclasses.replace(encoding, decoder=options.decoder)
    elif is_user_code(encoding.decoder):
        raise UsageError(
            f"data: {options.redacted_path}: encoded by your own {encoding.decoder}, which files never run. Use "
            f"--data.decoder={encoding.decoder}"
        )
    images = redact_url(options.originals) or encoding.images
    note = f"latents of {encoding.decoder}; samples are decoded to {_describe_shape(encoding)}, scores compare them "
    note += f"with {images}"
    return dataclasses.replace(
        dataset,
        encoding=encoding,
        notes=(*dataset.notes, note),
        open_originals=lambda: _open_originals(dataset, encoding, options),
    )


def _open_originals(latents: Dataset, encoding: ImageEncoding, options: DataOptions) -> Dataset:
    """Return the images that latents were made from, or those of `data.originals`.

    Raises:
        UsageError: they cannot be read, or are not what was encoded.
    """
    channels, height, width = encoding.image_shape
    try:
        originals = load_data(
            options.originals or encoding.images,
            resolution=ImageSize(width, height).resolution,
            channels=channels,
            labels=encoding.labels,
            max_bad_fraction=options.max_bad_fraction,
            max_pixels=options.max_pixels or None,
            remote=options.remote,
            value_range=AUTO if options.originals else encoding.range,
        )
        if not options.originals and originals.fingerprint != encoding.images_fingerprint:
            raise UsageError(f"data: {encoding.images} has changed since")
    except UsageError as error:
        raise UsageError(
            f"data.originals: scores need the images that {options.redacted_path} was encoded from, and {error}. Use "
            "--data.originals=PATH, or --evaluation.metrics=[]"
        ) from error
    return originals if latents.labels is not None else dataclasses.replace(originals, labels=None, classes=())


def _describe_shape(encoding: ImageEncoding) -> str:
    channels, height, width = encoding.image_shape
    return f"{ImageSize(width, height)}, {describe_channels(channels)}"


def resolve(run: Run, dataset: Dataset) -> Run:
    """Return a run with every field filled in that was left to the data, the device or the strategy.

    Raises:
        UsageError: if fields do not fit the data.
    """
    spec = make_spec(run.data, dataset)
    needs_float32 = False
    if isinstance(run.nets, DenoiserConfig):
        needs_float32 = run.nets.needs_float32
        run = dataclasses.replace(run, nets=run.nets.for_spec(spec))
    has_labels = run.data.labels and dataset.labels is not None
    has_size = not dataset.fields and not dataset.encoding  # which the options of the data name
    data = dataclasses.replace(
        run.data,
        labels=has_labels,
        cache="memory" if dataset.in_memory else "stream",
        resolution=spec.resolution if has_size else run.data.resolution,
        channels=spec.channels if has_size else run.data.channels,
        range=dataset.value_range.option if dataset.value_range else run.data.range,
    )
    device = run.device
    if device.precision == "auto":
        has_bf16 = backend_of(pick_device(device.kind)).supports_bf16()
        device = dataclasses.replace(device, precision="bf16" if has_bf16 and not needs_float32 else "float32")
    evaluation = run.evaluation
    if dataset.fields and run.data.mirror:
        raise UsageError("--mirror: flips images, and the data are records of several arrays. Use --data.transform")
    if dataset.is_array:
        if run.data.mirror:
            raise UsageError("--mirror: flips images, and the data are arrays. Leave it out.")
        if evaluation.features == "pixels" and not dataset.shows_images:
            evaluation = dataclasses.replace(evaluation, features="values")
    if device.concat_real_fake == "auto":
        is_builtin = not is_user_defined(run.nets, run.objective)  # a user-defined D may couple images
        has_streams = backend_of(pick_device(device.kind)).has_streams
        device = dataclasses.replace(device, concat_real_fake=is_builtin and has_streams)
    run = fill_strategy_defaults(dataclasses.replace(run, data=data, device=device, evaluation=evaluation))
    check_objective(run)
    check_labels_available(run.objective, has_labels)
    spec = make_spec(run.data, dataset)
    check_nets(run.nets, spec)
    check_objective_for_data(run.objective, spec)
    return run


def fill_strategy_defaults(run: Run) -> Run:
    """Return a run with the fields filled in that follow from its strategy."""
    if run.strategy.auto_request:  # the optimizers follow from the strategy that is chosen
        return run
    strategy = run.strategy.with_recorded_fields()
    return dataclasses.replace(
        run, strategy=strategy, g=resolve_optimizer("g", run.g, strategy), d=resolve_optimizer("d", run.d, strategy)
    )


def resolve_optimizer(section: str, player_optim: PlayerOptim, strategy: AnyStrategy) -> PlayerOptim:
    """Return how a player learns under a strategy that requires an optimizer or a wrapper.

    Args:
        section: of the run that has these settings, "g" or "d".
        player_optim: the settings.
        strategy: may require others.

    Raises:
        UsageError: if the player's own settings contradict the strategy.
    """
    optimizer = player_optim.optimizer
    wrapper = player_optim.optimizer_wrapper
    if strategy.requires_sgd:
        _check_paper_update(section, player_optim)
        if optimizer.name not in ("adam", "sgd", "rmsprop"):
            raise UsageError(
                f"{section}.optimizer={optimizer.name}: strategy.paper_update=true is gradient descent. Use "
                f"--{section}.optimizer=sgd, or --strategy.paper_update=false."
            )
        if optimizer.name == "sgd" and optimizer.momentum:
            raise UsageError(
                f"{section}.optimizer.momentum={optimizer.momentum:g}: strategy.paper_update=true is gradient descent "
                f"without momentum. Use --{section}.optimizer.momentum=0, or --strategy.paper_update=false."
            )
        if optimizer.name != "sgd":
            optimizer = SGD(lr=optimizer.lr)
        if wrapper not in ("auto", "none"):
            raise UsageError(
                f"{section}.optimizer_wrapper={wrapper}: strategy.paper_update=true is optimistic by itself. Use "
                f"--{section}.optimizer_wrapper=none."
            )
    if wrapper == "auto":
        wrapper = strategy.optimizer_wrapper
    extrapolation = player_optim.extrapolation
    if wrapper == "optimistic":
        extrapolation = strategy.extrapolation if extrapolation is None else extrapolation
    elif extrapolation in (None, strategy.extrapolation):  # run.yaml has the strategy's
        extrapolation = None
    else:
        raise UsageError(
            f"{section}.extrapolation={extrapolation}: is for optimizer_wrapper=optimistic, not {wrapper}. Use "
            f"--{section}.extrapolation=null."
        )
    return dataclasses.replace(
        player_optim, optimizer=optimizer, optimizer_wrapper=wrapper, extrapolation=extrapolation
    )


def _check_paper_update(section: str, player_optim: PlayerOptim) -> None:
    """Raise UsageError if a player changes its step, under a strategy that takes steps of its own."""
    if player_optim.max_norm is not None:
        raise UsageError(
            f"{section}.max_norm={player_optim.max_norm:g}: strategy.paper_update=true takes steps of its own. Use "
            f"--{section}.max_norm=null, or --strategy.paper_update=false."
        )
    if player_optim.groups:
        raise UsageError(
            f"{section}.groups.0.pattern={player_optim.groups[0].pattern}: strategy.paper_update=true moves all "
            f"parameters alike. Use --{section}.groups=[], or --strategy.paper_update=false."
        )
    if not player_optim.decay_norms_and_biases:
        raise UsageError(
            f"{section}.decay_norms_and_biases=false: strategy.paper_update=true has no weight decay. Use "
            f"--{section}.decay_norms_and_biases=true, or --strategy.paper_update=false."
        )


def run_after_rollbacks(run: Run, num_rollbacks: int) -> Run:
    """Return the run that is trained after so many rollbacks. The recorded run stays as it was asked for."""
    if not num_rollbacks:
        return run
    factor = run.on_divergence.lr_factor**num_rollbacks
    return dataclasses.replace(
        run,
        g=_with_lr_factor(run.g, factor),
        d=_with_lr_factor(run.d, factor),
        seed=seed_after_rollbacks(run, num_rollbacks),
    )


def seed_after_rollbacks(run: Run, num_rollbacks: int) -> int:
    """Return the seed of images, latents and labels after so many rollbacks."""
    if not num_rollbacks or not run.on_divergence.reseed:
        return run.seed
    return int(philox_generator(run.seed, "rollback", position=num_rollbacks).integers(2**63))


def _with_lr_factor(player_optim: PlayerOptim, factor: float) -> PlayerOptim:
    return dataclasses.replace(
        player_optim, optimizer=with_lr(player_optim.optimizer, player_optim.optimizer.lr * factor)
    )
