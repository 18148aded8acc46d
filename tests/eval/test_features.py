import hashlib
import sys

import pytest
import torch
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.eval import features
from paragan.eval.features import download_inception, inception_2015, module_features, named_space, pixels
from paragan.eval.metrics import metric_names


class Means(nn.Module):
    """The mean of each channel, times a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, images):
        return images.float().mean((2, 3)) * self.weight


def test_pixels_are_the_image():
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    space = named_space("pixels", 4, 3)
    assert space.num_features == space.module.num_features == 48
    assert torch.equal(space(images), images.reshape(5, 48) / 255)
    assert space == pixels(4, 3)
    assert space.hash != pixels(4, 1).hash
    with pytest.raises(UsageError, match=r"is for images \(3, 4, 4\), and these are \(1, 4, 4\)"):
        space(images[:, :1])


def test_unknown_space_suggests_the_nearest():
    known = "pixels, inception, values, resnet20, module:callable"
    with advises(f"space=pixel: is none of {known}; did you mean pixels?"):
        named_space("pixel", 8, 3)
    assert named_space("pixels", 8, 3)


def test_images_have_no_space_of_numbers():
    with advises("space=values: is for arrays of numbers, and the data are images. Use pixels"):
        named_space("values", 8, 1)
    assert named_space("pixels", 8, 1)


def test_images_of_four_channels_have_no_inception(own_space):
    with advises("Use pixels, or module:callable for a network of your own"):
        named_space("inception", 8, 4)
    assert named_space("pixels", 8, 4).num_features == 256
    assert features.space_from_module("own_space:Means", (4, 8, 8)).num_features == 4


def test_missing_inception_file_names_its_source(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    with advises("Put it there, or name another place by --inception PATH, or score fd, which needs no file") as error:
        named_space("inception", 32, 3)
    line = str(error.value)
    place = tmp_path / ".cache/paragan/pt_inception-2015-12-05-6726825d.pth"
    assert all(part in line for part in (str(place), features.INCEPTION_URL, "sha256 starts with 6726825d", "score fd"))
    assert "\n" not in line
    monkeypatch.setattr(features, "INCEPTION_SHA256", hashlib.sha256(b"weights").hexdigest())
    for file in (place, tmp_path / "other.pth"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"weights")
    assert named_space("inception", 32, 3).is_inception
    assert named_space("inception", 32, 3, tmp_path / "other.pth").is_inception
    assert metric_names("fd", named_space("pixels", 32, 3)) == ("fd_pixels",)


def test_other_weights_need_another_name(inception_file):
    url = features.INCEPTION_URL
    with advises(f"Use {url}, or in Python `inception_2015(path, name=NAME)` for these weights"):
        named_space("inception", 32, 3, path=inception_file)
    space = inception_2015(inception_file, name="mine")
    assert (space.name, space.is_inception) == ("mine", False)
    assert space.hash == hashlib.sha256(inception_file.read_bytes()).hexdigest()[:16]
    observed = space(torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8))
    assert observed.shape == (2, 2048)
    assert space.logits(observed).shape == (2, 1008)


def test_the_right_digest_makes_it_inception(monkeypatch, inception_file):
    monkeypatch.setattr(features, "INCEPTION_SHA256", hashlib.sha256(inception_file.read_bytes()).hexdigest())
    space = named_space("inception", 32, 3, path=str(inception_file))
    assert (space.name, space.is_inception, space.resizer) == ("inception", True, "tf1-bilinear-299")


def test_file_with_code_raises(inception_file, tmp_path):
    torch.save(Means(), tmp_path / "code.pth")
    (tmp_path / "text.pth").write_text("<html>not found</html>")
    for name in ("code", "text"):
        file = tmp_path / f"{name}.pth"
        with advises(f"--inception={file}: holds no weights that can be read safely. Use {features.INCEPTION_URL}"):
            _ = inception_2015(file, name="mine").module
    assert inception_2015(inception_file, name="mine").module


def test_download_is_complete_or_absent(monkeypatch, tmp_path):
    source, file = tmp_path / "source", tmp_path / "cache" / "file.pth"
    source.write_bytes(b"weights")
    with pytest.raises(UsageError, match="sha256 starts with"):
        download_inception(file, source.as_uri())
    with advises(f"Put the file at {file}"):
        download_inception(file, (tmp_path / "nothing").as_uri())
    assert not list(file.parent.iterdir())
    monkeypatch.setattr(features, "INCEPTION_SHA256", hashlib.sha256(b"weights").hexdigest())
    file.write_bytes(b"weights")
    assert inception_2015(file, download=True).is_inception
    file.unlink()
    download_inception(file, source.as_uri())
    assert [f.name for f in file.parent.iterdir()] == ["file.pth"]


def test_space_of_a_module_is_a_copy():
    module = Means()
    space = module_features("means", module, 3)
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    before = space(images)
    with torch.no_grad():
        module.weight.fill_(2)
    assert torch.equal(space(images), before)
    assert space.hash == module_features("means", Means(), 3).hash != module_features("means", module, 3).hash
    assert not space(images).requires_grad
    assert module.weight.requires_grad


def test_wrong_feature_shape_raises():
    with pytest.raises(UsageError, match=r"space=means: returned features \[2, 3\], expected \[2, 4\]"):
        module_features("means", Means(), 4)(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["inception", "pixels", "fid", "a b", ""])
def test_names_of_spaces_are_reserved(name):
    with advises("is taken, or has other characters than letters, digits, - and _. Use my-classifier"):
        module_features(name, Means(), 3)
    assert module_features("my-classifier", Means(), 3).name == "my-classifier"


def test_autocast_does_not_change_a_score():
    linear = nn.Sequential(nn.Flatten(), Double(), nn.Linear(48, 4))
    space = module_features("linear", linear, 4)
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = space(images)
    assert torch.equal(inside, space(images))


class Double(nn.Module):
    def forward(self, x):
        return x.float()


# a user's code

OWN = """
import torch
from torch import nn

class Means(nn.Module):
    def forward(self, images):
        return images.float().mean((2, 3))

    def logits(self, features):
        return features @ torch.ones(features.shape[1], 7, dtype=features.dtype)

made = Means()
wrong = lambda: nn.Identity()
"""


@pytest.fixture
def own_space(monkeypatch, tmp_path):
    """Make OWN importable."""
    (tmp_path / "own_space.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_space_from_user_code(own_space):
    expected = "a network from uint8 [N, C, H, W] to features [N, F], or a function that returns one"
    with advises(f"space=own_space:wrong: returned [2, 3, 8, 8] for 2 images, expected [2, F]. Use {expected}"):
        features.space_from_module("own_space:wrong", (3, 8, 8))
    missing = f"module 'own_space' ({sys.modules['own_space'].__file__}) has no attribute 'no'"
    with advises(f"space=own_space:no: AttributeError: {missing}. Use {expected}"):
        features.space_from_module("own_space:no", (3, 8, 8))
    with pytest.raises(UsageError, match="Use a network"):
        features.space_from_module("no_such_module:x", (3, 8, 8))
    for name in ("Means", "made"):
        space = features.space_from_module(f"own_space:{name}", (3, 8, 8))
        assert (space.name, space.num_features, space.num_logits) == (name, 3, 7)
        assert space(torch.full((2, 3, 8, 8), 9, dtype=torch.uint8)).tolist() == [[9] * 3] * 2
