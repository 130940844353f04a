"""
Writes console.svg, what a training shows on a terminal while it goes on and at its end:

    python demo/prepare_verses.py data/verses
    python docs/screenshots.py
"""

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
CONFIG = "training_configs/verse_classifier.jsonnet"
OUTPUT = "output/verses"
COLUMNS = 118

# Bars are kept of this epoch, drawn when some of its steps were done.
SHOWN_EPOCH = "Epoch 1/"


def record(command: List[str]) -> str:
    """What a command prints on a terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment.pop("ALLENNLP_LOG_LEVEL", None)
    process = subprocess.Popen(
        command, stdout=slave, stderr=subprocess.DEVNULL, env=environment, cwd=DOCS.parent
    )
    os.close(slave)
    printed = b""
    try:
        while chunk := os.read(master, 65536):
            printed += chunk
    except OSError:
        pass  # the end of a terminal
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)} failed:\n{printed.decode(errors='replace')}")
    return printed.decode(errors="replace").replace("\r\n", "\n")


def as_seen(printed: str) -> List[str]:
    """The lines that are left on the terminal, and among them a bar as it was drawn in an epoch."""
    seen: List[str] = []
    for line in printed.split("\n"):
        drawings = [d for d in re.split(r"\r?\x1b\[2K", line) if d]
        bars = [d for d in drawings if SHOWN_EPOCH in d and "━" in d and "loss" in d]
        if bars:
            seen.append(bars[len(bars) * 2 // 3])
        if drawings:
            seen.append(drawings[-1])
    return seen


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = os.path.join(temporary, "verses")
        command = ["allennlp", "train", CONFIG, "-s", directory]
        command += ["--include-package", "allennlp_deepspeed", "-o", '{"trainer.num_epochs": 3}']
        text = "\n".join(as_seen(record(command))).replace(directory, OUTPUT)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ allennlp train {CONFIG} -s {OUTPUT}"), style="bold")
    console.print(Text.from_ansi(text))
    picture = console.export_svg(title="allennlp train")
    # Fonts of another host.
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    (DOCS / "console.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
