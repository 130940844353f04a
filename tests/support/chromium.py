"""
What a browser makes of a page, in headless Chromium (Debian's package `chromium`).
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import List, NamedTuple, Tuple

import numpy
import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium")

requires_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

# Two instances beside other tests have taken a quarter of it.
_TIME_LIMIT = 60


class Shown(NamedTuple):
    """
    # Parameters

    document : `str`
        After its scripts have run.
    messages : `List[str]`
        Of the console.
    picture : `Image.Image`
    """

    document: str
    messages: List[str]
    picture: Image.Image

    def num_pixels(self, colour: Tuple[int, int, int]) -> int:
        """Of about this colour."""
        pixels = numpy.asarray(self.picture.convert("RGB"), dtype=int)
        return int((abs(pixels - colour) < 12).all(axis=-1).sum())


def show(page: Path, directory: Path, width: int, height: int, is_dark: bool = False) -> Shown:
    """Has Chromium open a file, with a profile of its own and without network."""
    assert CHROMIUM is not None
    picture = directory / f"{width}_{is_dark}.png"
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={directory / 'profile'}",
        f"--window-size={width},{height}",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        "--virtual-time-budget=10000",
        "--enable-logging=stderr",
        "--dump-dom",
        f"--screenshot={picture}",
        page.resolve().as_uri(),
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIME_LIMIT, check=True
    )
    messages = re.findall(r":CONSOLE[:(]\d+\)?\] (.*)", process.stderr)
    with Image.open(picture) as image:
        image.load()
    return Shown(process.stdout, messages, image)
