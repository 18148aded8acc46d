"""Teachers in folders of `diffusers` pipelines: what is loaded computes what that package does, and what is refused."""

from __future__ import annotations

import shutil
import sys

import diffusers
import pytest
import safetensors.torch
import torch

from advice import advises
from paragan.core.errors import UsageError
from paragan.models.diffusers_pipeline import read_pipeline
from paragan.models.diffusion_teacher import load_denoiser, student_nets
from paragan.nets import DiffusersUNet, Spec
from tiny_pipelines import edit_json, make_pipeline

DIGITS = Spec(8, 1, 10)
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline") / "saved"
    make_pipeline(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copied")


@pytest.mark.slow(after=6)
@pytest.mark.parametrize("classes", [10, None])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("scheduler", [diffusers.DDPMScheduler, diffusers.DDIMScheduler])
def test_a_denoiser_is_what_the_pipeline_expects(prediction, classes, scheduler, tmp_path):
    pipeline = make_pipeline(tmp_path, prediction, scheduler=scheduler, num_class_embeds=classes)
    denoiser, nets = load_denoiser(tmp_path, Spec(8, 1, classes or 0))
    y = torch.tensor([3]) if classes else None
    oracle = scheduler.from_config(pipeline.scheduler.config, clip_sample=False)
    oracle.set_timesteps(1000)
    for t in (0, 1, 250, 500, 998, 999):
        a = oracle.alphas_cumprod[t].sqrt()
        x = torch.randn(1, 1, 8, 8)
        with torch.no_grad():
            images = denoiser.denoise(x / a, (1 / a**2 - 1).sqrt()[None], y)
            output = pipeline.unet(x, t, class_labels=y).sample
        expected = oracle.step(output, t, x).pred_original_sample
        assert (images - expected).abs().max() < 2e-4 * expected.abs().max()
    assert nets.needs_float32 == (prediction == "epsilon")
    assert nets.sigma_max == {"epsilon": 15}.get(prediction, 80)
    assert nets.sigma_min == pytest.approx(0.01, rel=1e-3)


def test_features_are_those_of_the_middle_block(saved):
    nets = student_nets(saved, DIGITS)
    critic = nets.discriminator(DIGITS)
    x, y = torch.randn(2, 1, 8, 8), torch.tensor([1, 2])
    images, features = critic.denoiser.denoise_with_features(x, torch.ones(2), y)
    assert features.shape == (2, 8, 4, 4)
    torch.testing.assert_close(images, critic.denoiser.denoise(x, torch.ones(2), y))
    assert not critic.denoiser.unet.model.mid_block._forward_hooks
    assert critic(x, y).logits.shape == (2,)


def test_students_do_not_need_the_folder(saved):
    nets = student_nets(saved, DIGITS)
    assert (nets.steps, nets.critic, nets.latent) == (1, "score", 64)
    assert "_diffusers_version" not in nets.unet
    teacher, _ = load_denoiser(saved)
    assert nets.generator(DIGITS).state_dict().keys() == teacher.state_dict().keys()


def test_weights_in_names_of_older_versions_and_in_half_precision(saved, copied):
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    weights = safetensors.torch.load_file(copied / WEIGHTS)
    old = {}
    for name, value in weights.items():
        for new, former in names.items():
            name = name.replace(new, former)
        old[name] = value.half()
    assert sum("query" in name for name in old) == 8
    safetensors.torch.save_file(old, copied / WEIGHTS, {"format": "pt"})
    expected = load_denoiser(saved)[0].state_dict()
    for name, value in load_denoiser(copied)[0].state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-6)


def test_dropout_is_left_out(tmp_path):
    make_pipeline(tmp_path, dropout=0.5)
    g = student_nets(tmp_path, DIGITS).generator(DIGITS)
    z, y = torch.randn(2, 64), torch.tensor([0, 1])
    assert torch.equal(g(z, y), g(z, y))


def test_pickles_are_not_opened(saved, tmp_path):
    folder = tmp_path / "pickled"
    diffusers.DDPMPipeline.from_pretrained(saved).save_pretrained(folder, safe_serialization=False)
    with advises(
        f"distill_from={folder}: unet/diffusion_pytorch_model.bin is a pickle, whose loading can run code. Convert it "
        f"where you trust it: DDPMPipeline.from_pretrained({str(folder)!r}, use_safetensors=False)"
        ".save_pretrained(FOLDER)"
    ):
        read_pipeline(folder)
    converted = tmp_path / "converted"
    diffusers.DDPMPipeline.from_pretrained(str(folder), use_safetensors=False).save_pretrained(converted)
    load_denoiser(converted, DIGITS)


def test_a_part_of_a_pipeline(saved):
    with advises(
        f"distill_from={saved / 'unet'}: has no model_index.json. Use the folder of a whole pipeline, as "
        "save_pretrained writes it"
    ):
        load_denoiser(saved / "unet")
    load_denoiser(saved)


def test_variants_are_not_guessed(saved, tmp_path):
    pipeline = diffusers.DDPMPipeline.from_pretrained(saved)
    pipeline.save_pretrained(tmp_path / "variant", variant="fp16")
    with advises(
        f"distill_from={tmp_path / 'variant'}: has no unet/diffusion_pytorch_model.safetensors, but "
        "diffusion_pytorch_model.fp16.safetensors. Save it with save_pretrained(FOLDER), without a variant"
    ):
        read_pipeline(tmp_path / "variant")
    pipeline.save_pretrained(tmp_path / "plain")
    load_denoiser(tmp_path / "plain", DIGITS)


def test_components_that_have_no_place(copied):
    index = copied / "model_index.json"

    def with_components(**components):
        edit_json(index, lambda content: content.update(components))

    with_components(text_encoder=["transformers", "CLIPTextModel"], tokenizer=["transformers", "CLIPTokenizer"])
    with_components(unet=["diffusers", "UNet2DConditionModel"], vae=["diffusers", "AutoencoderKL"])
    with advises(
        f"distill_from={copied}: is conditioned on text (text_encoder, tokenizer, UNet2DConditionModel), and the data "
        "have no prompts. Use a pipeline with a UNet2DModel, which has no condition, or a class"
    ):
        read_pipeline(copied)
    with_components(text_encoder=[None, None], tokenizer=[None, None], unet=["diffusers", "UNet2DModel"])
    with advises(
        f"distill_from={copied}: makes latents that its vae decodes, and the data are images. Use a pipeline that "
        "makes pixels"
    ):
        read_pipeline(copied)
    with_components(vae=[None, None], unet=["my_code", "UNet2DModel"], guide=["diffusers", "ControlNetModel"])
    with advises(
        f"distill_from={copied}: its networks are unet (UNet2DModel), guide (ControlNetModel). Use a pipeline with a "
        "UNet2DModel of diffusers alone, such as DDPMPipeline"
    ):
        read_pipeline(copied)
    with_components(guide=[None, None], unet=["diffusers", "UNet2DModel"], scheduler=["diffusers", "PNDMScheduler"])
    with advises(
        f"distill_from={copied}: its scheduler is PNDMScheduler. Use DDPMScheduler.from_config(scheduler.config) if "
        "its betas are those of DDPM"
    ):
        read_pipeline(copied)
    pipeline = diffusers.DDPMPipeline.from_pretrained(copied)
    pipeline.scheduler = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
    pipeline.save_pretrained(copied)
    load_denoiser(copied, DIGITS)


def test_noise_of_other_kinds(copied):
    scheduler = copied / "scheduler" / "scheduler_config.json"
    edit_json(scheduler, lambda content: content.update(trained_betas=[0.1] * 10))
    with advises(
        f"distill_from={copied}: its scheduler has trained_betas. Use a pipeline whose betas are linear, scaled_linear "
        "or squaredcos_cap_v2"
    ):
        read_pipeline(copied)
    for betas in ("linear", "scaled_linear", "squaredcos_cap_v2"):
        edit_json(scheduler, lambda content, betas=betas: content.update(trained_betas=None, beta_schedule=betas))
        read_pipeline(copied)
    for field, wrong in (("beta_schedule", "sigmoid"), ("prediction_type", "flow_prediction"), ("beta_end", 2)):
        before = scheduler.read_text()
        edit_json(scheduler, lambda content, field=field, wrong=wrong: content.update({field: wrong}))
        with pytest.raises(UsageError, match=f"^distill_from=.*scheduler_config.json: {field}={wrong}: [^\n]*$"):
            read_pipeline(copied)
        scheduler.write_text(before)
    edit_json(scheduler, lambda content: content.update(beta_schedule="linear", beta_end=0.99))
    with pytest.raises(UsageError, match="does not grow, or is infinite at the end"):
        read_pipeline(copied)


def test_data_that_differ(saved, tmp_path):
    def message(field, name, of_teacher, of_data, advice):
        return (
            f"--data.{field}: the teacher in {saved} makes images of {name} {of_teacher}, and the data have {of_data}. "
            f"Use {advice}"
        )

    for field, name, of_teacher, spec, of_data, advice in (
        ("resolution", "resolution", 8, Spec("8x16", 1, 10), "8x16", "--data.resolution=8"),
        ("channels", "channels", 1, Spec(8, 3, 10), 3, "--data.channels=1"),
        ("labels", "classes", 10, Spec(8, 1, 4), 4, "data of 10 classes"),
        ("labels", "classes", 10, Spec(8, 1), 0, "data of 10 classes"),
    ):
        with pytest.raises(UsageError) as error:
            student_nets(saved, spec)
        assert str(error.value) == message(field, name, of_teacher, of_data, advice)
    make_pipeline(tmp_path, num_class_embeds=None)
    with pytest.raises(UsageError, match=r"classes 0, and the data have 10. Use --data.labels=false"):
        student_nets(tmp_path, DIGITS)
    student_nets(tmp_path, Spec(8, 1))


@pytest.mark.parametrize(
    ("change", "field", "supported"),
    [
        ({"out_channels": 2}, "out_channels", 1),
        ({"mid_block_type": None}, "mid_block_type", "UNetMidBlock2D"),
        ({"time_embedding_type": "fourier"}, "time_embedding_type", "positional"),
        ({"class_embed_type": "timestep", "num_class_embeds": None}, "class_embed_type", None),
    ],
)
def test_networks_of_another_kind(change, field, supported, tmp_path):
    make_pipeline(tmp_path / "other", **change)
    spec = Spec(8, 1, change.get("num_class_embeds", 10) or 0)
    nets = student_nets(tmp_path / "other", spec)
    with advises(
        f"nets.unet.{field}={nets.unet[field]}: distillation on these data needs {supported}. Use a teacher with "
        f"{field}={supported}"
    ):
        nets.check(spec)
    make_pipeline(tmp_path / "supported", **change | {field: supported})
    student_nets(tmp_path / "supported", spec).check(spec)


def test_sizes_of_a_network_that_records_none(tmp_path):
    make_pipeline(tmp_path, sample_size=None)
    with advises("data.resolution=9: the network halves images 1 times. Use --data.resolution=8"):
        load_denoiser(tmp_path, Spec(9, 1, 10))
    load_denoiser(tmp_path, Spec(8, 1, 10))
    load_denoiser(tmp_path, Spec("8x12", 1, 10))


def test_damaged_folders(copied):
    for file, content, message in (
        (WEIGHTS, b"\0" * 100, "its weights cannot be loaded"),
        ("unet/config.json", b"[]", "unet/config.json holds no fields"),
        ("unet/config.json", b"{", "unet/config.json cannot be read"),
        ("unet/config.json", b'{"sample_size": "large"}', "unet/config.json cannot be used"),
        ("model_index.json", b"\xff", "model_index.json cannot be read"),
    ):
        before = (copied / file).read_bytes()
        (copied / file).write_bytes(content)
        with pytest.raises(UsageError, match=message) as error:
            load_denoiser(copied, DIGITS)
        assert "\n" not in str(error.value)
        (copied / file).write_bytes(before)
    config = (copied / "unet/config.json").read_text()
    edit_json(copied / "unet/config.json", lambda content: content.update(odd=1))
    with pytest.raises(UsageError, match=r"nets.unet: diffusers cannot build this UNet2DModel: [^\n]*'odd'"):
        load_denoiser(copied, DIGITS)
    (copied / "unet/config.json").write_text(config)
    weights = safetensors.torch.load_file(copied / WEIGHTS)
    weights.pop("conv_in.weight")
    safetensors.torch.save_file(weights | {"extra": torch.ones(1)}, copied / WEIGHTS, {"format": "pt"})
    with pytest.raises(UsageError, match=r"the first names that differ: conv_in.weight, extra"):
        load_denoiser(copied, DIGITS)


def test_a_network_comes_from_a_folder(saved):
    with advises("nets.unet={}: has the sizes of a pipeline's network. Use paragan train distill --teacher FOLDER"):
        DiffusersUNet().check(DIGITS)
    student_nets(saved, DIGITS).check(DIGITS)


def test_the_package_is_missing(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UsageError, match="needs the package diffusers: pip install diffusers"):
        read_pipeline(saved)
