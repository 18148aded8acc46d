"""Waves in a report: which are played, how they are bounded, and what is drawn."""

import base64
import io
import re
from pathlib import Path

import numpy as np
from PIL import Image

from fake_records import RATE, write_wave_samples
from paragan.report.embedded_audio import MAX_PAIRS, load_audio, waves_dir
from paragan.report.page import MAX_PAGE_BYTES, write_report

SECOND = np.arange(RATE) / RATE


def tone(hz: float) -> np.ndarray:
    return np.sin(2 * np.pi * hz * SECOND)[None] * 0.5


def make_run_dir(folder: Path) -> Path:
    (folder / "run.yaml").write_text("recipe: vocoder\n")
    return folder


def data_uri(path: Path) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(path.read_bytes()).decode()}"


def brightest_row(uri: str) -> int:
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        return int(np.asarray(image, np.float64).mean(1).argmax())


def test_the_newest_waves_are_played(tmp_path):
    run_dir = make_run_dir(tmp_path)
    write_wave_samples(run_dir, 9, np.stack([[tone(300), tone(300)]]))
    write_wave_samples(run_dir, 120, np.stack([[tone(200), tone(2000)], [tone(400), tone(800)]]))
    page = write_report(run_dir).read_text("utf-8")
    names = ["0_generated.wav", "0_real.wav", "1_generated.wav", "1_real.wav"]
    expected = [data_uri(waves_dir(run_dir, 120) / name) for name in names]
    assert re.findall(r'<audio controls src="([^"]+)"', page) == expected
    assert "media-src data:" in page
    assert "At 120 kimg" in page
    assert "Long waves are cut" not in page
    rows = [brightest_row(picture) for picture in re.findall(r'<img src="([^"]+)" alt="spectrogram of', page)]
    assert rows[0] > rows[2] > rows[3] > rows[1], "high tones stand above low ones"


def test_damaged_waves_are_left_out(tmp_path):
    write_wave_samples(tmp_path, 1, np.stack([[tone(200), tone(300)]] * 2))
    folder = waves_dir(tmp_path, 1)
    for name in ("0_generated.wav", "1_real.wav"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    (waves_dir(tmp_path, 2)).mkdir()
    (tmp_path / "samples" / "notes.txt").touch()
    audio = load_audio(tmp_path, 1_000_000)
    assert audio.kimg == 1
    (pair,) = audio.pairs
    assert pair.generated.name == "1_generated.wav"
    assert pair.real is None
    assert audio.notes == (
        "0_generated.wav is not a complete 16-bit WAV file and is left out.",
        "1_real.wav is not a complete 16-bit WAV file and is left out.",
    )


def test_long_waves_are_cut_to_the_page(tmp_path):
    run_dir = make_run_dir(tmp_path)
    noise = np.random.default_rng(0).uniform(-1, 1, (MAX_PAIRS, 2, 2, 400_000))
    write_wave_samples(run_dir, 1, noise, 44_100)
    assert write_report(run_dir).stat().st_size < MAX_PAGE_BYTES
    audio = load_audio(run_dir, 1_000_000)
    assert 600_000 < audio.num_chars < 1_000_000
    assert audio.notes == ("Long waves are cut here; the run folder has all of them.",)
    assert all(pair.real and pair.generated.seconds == pair.real.seconds < 1 for pair in audio.pairs)


def test_without_room_or_waves(tmp_path):
    assert load_audio(tmp_path, 1_000_000).pairs == ()
    write_wave_samples(tmp_path, 1, np.stack([[tone(200)[:, :50], tone(300)[:, :50]]]))
    assert load_audio(tmp_path, 1000).notes == ("Its waves are in the run folder: this page has no room for them.",)
    (pair,) = load_audio(tmp_path, 1_000_000).pairs
    assert pair.generated.spectrogram is None, "shorter than a window"
