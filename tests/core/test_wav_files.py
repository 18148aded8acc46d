"""Waves as 16-bit WAV files."""

import wave

import numpy as np

from fake_records import noise, wav_bytes
from paragan.core.wav_files import encode_wav, read_wav
from paragan.data.records.audio import decode_audio


def test_16_bits_are_written_exactly(tmp_path):
    samples = np.stack([noise(50), -noise(50, 1)])
    data = encode_wav(samples.astype(np.float32) / 32768, 8000)
    assert data == wav_bytes(samples.T)
    audio = decode_audio(data)
    assert audio.rate == 8000
    assert np.array_equal(audio.samples, samples)
    (tmp_path / "a.wav").write_bytes(data)
    read = read_wav(tmp_path / "a.wav", 1000)
    assert read
    assert np.array_equal(read.samples * 32768, samples)


def test_values_out_of_range_are_clipped():
    (pcm,) = decode_audio(encode_wav(np.array([[-2, -1, 0.5, 1, np.nan, np.inf]]), 8000)).samples
    assert pcm.tolist() == [-32768, -32768, 16384, 32767, 0, 32767]


def test_the_start_of_a_long_file_is_read(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav_bytes(noise(100).reshape(50, 2)))
    read = read_wav(path, 83)
    assert read
    assert read.samples.shape == (2, 20)


def test_other_files_are_none(tmp_path):
    path = tmp_path / "a.wav"
    assert read_wav(path, 1000) is None
    data = wav_bytes(noise(100))
    for content in (b"", data[:30], data[:-1], b"RIFF", wav_bytes(noise(0))):
        path.write_bytes(content)
        assert read_wav(path, 1000) is None
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 1, 8000, 0, "NONE", ""))  # 8 bits
        file.writeframes(bytes(10))
    assert read_wav(path, 1000) is None
