"""
Writes console.svg, what a training shows on a terminal while it goes on and at its end, and
report.png, the report of it and of another one:

    python demo/prepare_verses.py data/verses
    python -m docs.screenshots

Needs Chromium (Debian's package `chromium`).
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

from tests.support.chromium import CHROMIUM, show

DOCS = Path(__file__).resolve().parent
CONFIG = "training_configs/verse_classifier.jsonnet"
OUTPUT = "output/verses"
COLUMNS = 124

# The run that the report compares with it, and its overrides.
OTHER = ("verses_lr_0.02", '{"trainer.num_epochs": 3, "trainer.optimizer.lr": 0.02}')
WIDTH, MAX_HEIGHT = 1400, 4000  # of the report in pixels

# Where its last section begins, once all curves are drawn.
MEASURE = """<script>
setInterval(() => {
  const last = document.querySelector("section:last-of-type");
  const isDrawn = Bokeh.documents.length && Bokeh.documents[0].is_idle;
  if (isDrawn) document.body.dataset.end = last.offsetTop;
}, 50);
</script>"""

# Bars are kept of this epoch, drawn when some of its steps were done.
SHOWN_EPOCH = "Epoch 2 of "


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


def train(directory: str, overrides: str = '{"trainer.num_epochs": 3}') -> str:
    """What it prints."""
    command = ["allennlp", "train", CONFIG, "-s", directory, "-o", overrides]
    return record([*command, "--include-package", "allennlp_deepspeed"])


def draw_console(printed: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    command = f"$ allennlp train {CONFIG} -s {OUTPUT} --include-package allennlp_deepspeed"
    console.print(Text.from_ansi(command), style="bold")
    console.print(Text.from_ansi("\n".join(as_seen(printed))))
    picture = console.export_svg(title="allennlp train")
    # Fonts of another host.
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    (DOCS / "console.svg").write_text(picture, encoding="utf-8")


def draw_report(directories: List[str], temporary: Path) -> None:
    """As far as the section before the last one, which names hosts."""
    page = temporary / "report.html"
    record(["allennlp", "deepspeed", "report", *directories, "--output", str(page)])
    with page.open("a") as file:
        file.write(MEASURE)
    shown = show(page, temporary, WIDTH, MAX_HEIGHT)
    end = re.search(r'data-end="(\d+)"', shown.document)
    assert end is not None and int(end.group(1)) <= MAX_HEIGHT
    picture = shown.picture.convert("RGB").crop((0, 0, WIDTH, int(end.group(1))))
    # A palette is enough for it, and takes a third.
    picture.quantize(128).save(DOCS / "report.png", optimize=True)


def main() -> None:
    if CHROMIUM is None:
        sys.exit("It needs Chromium, as the command chromium.")
    with tempfile.TemporaryDirectory() as temporary:
        directories = [os.path.join(temporary, name) for name in (Path(OUTPUT).name, OTHER[0])]
        printed = train(directories[0])
        train(directories[1], OTHER[1])
        draw_console(printed.replace(directories[0], OUTPUT))
        draw_report(directories, Path(temporary))


if __name__ == "__main__":
    main()
