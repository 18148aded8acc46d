"""Write frames as a video: .gif, .webp, or .mp4 with imageio-ffmpeg (the extra `video`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError
from paragan.core.image_grid import visible_channels

VIDEO_SUFFIXES = (".mp4", ".gif", ".webp")
MAX_GIF_FPS = 50  # the unit is 1/100 s, and browsers show 1/100 s as 1/10 s
MIN_SIDE_PIXELS = 256  # of the longer side; smaller frames are enlarged by an integer factor


def write_video(frames: np.ndarray, out: Path, fps: float) -> None:
    """Write frames, uint8 [N, H, W, C], as a looping video in the format that the suffix of `out` names."""
    suffix = out.suffix.lower()
    check_video_options(out, fps)
    frames = visible_channels(frames)
    scale = max(1, MIN_SIDE_PIXELS // max(frames.shape[1:3]))
    frames = frames.repeat(scale, axis=1).repeat(scale, axis=2)
    if suffix == ".mp4":
        _write_mp4(frames, out, fps)
        return
    images = [Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame) for frame in frames]
    with atomic_output(out) as path:
        options = {"lossless": False, "quality": 85} if suffix == ".webp" else {}
        images[0].save(
            path, suffix[1:].upper(), save_all=True, append_images=images[1:], duration=1000 / fps, loop=0, **options
        )


def check_video_options(out: Path, fps: float) -> None:
    """Raise UsageError for an unknown format, a missing extra, or a frame rate that the format cannot show."""
    suffix = out.suffix.lower()
    if suffix not in VIDEO_SUFFIXES:
        raise UsageError(f"--video {out}: unknown format. Use {', '.join(VIDEO_SUFFIXES)}")
    if suffix == ".gif" and fps > MAX_GIF_FPS:
        raise UsageError(f"--fps {fps:g}: a .gif shows at most {MAX_GIF_FPS} frames per second. Use .webp or .mp4")
    if suffix == ".mp4":
        _require_ffmpeg()


def _write_mp4(frames: np.ndarray, out: Path, fps: float) -> None:
    frames = frames.repeat(3, axis=3) if frames.shape[3] == 1 else frames
    frames = np.pad(
        frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0))
    )  # yuv420p needs even sides
    height, width = frames.shape[1:3]
    with atomic_output(out) as path:
        file = path.with_name(f"{path.name}.mp4")  # ffmpeg chooses the format by the suffix
        try:
            options = {"codec": "libx264", "macro_block_size": 2, "quality": 8, "ffmpeg_log_level": "error"}
            writer = _require_ffmpeg().write_frames(str(file), (width, height), fps=fps, **options)
            writer.send(None)
            for frame in frames:
                writer.send(np.ascontiguousarray(frame))
            writer.close()
            file.rename(path)
        finally:
            file.unlink(missing_ok=True)


def _require_ffmpeg() -> Any:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise UsageError(
            "--video: an .mp4 needs imageio-ffmpeg. Use pip install imageio-ffmpeg, or a .gif or .webp"
        ) from error
    return imageio_ffmpeg
