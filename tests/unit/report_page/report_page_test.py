"""
The page of `allennlp deepspeed report`, of runs whose metrics are written here.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.report_page.charts import charts
from allennlp_deepspeed.report_page.page import page
from allennlp_deepspeed.report_page.run import Run, differences
from allennlp_deepspeed.reports.metrics_file import FILE_NAME
from tests.support.chromium import requires_chromium, show

EVIL = "</script><script>document.title = 'taken over'</script>"
BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def write_run(directory: Path, num_steps: int = 8, lr: float = 0.5) -> Path:
    """Of two epochs, with a crash and a recovery in the middle."""
    directory.mkdir(parents=True)
    config = {"trainer": {"optimizer": {"lr": lr}, "num_epochs": 2}, "model": {"type": EVIL}}
    (directory / "config.json").write_text(json.dumps(config))
    lines: List[Dict[str, Any]] = []
    time = 1_000_000.0
    for step in range(1, num_steps + 1):
        epoch = int(step > num_steps // 2)
        if step in (1, num_steps // 2 + 1):
            kind = "start" if step == 1 else "recover"
            time += 5000
            environment = {"world_size": 2, "num_epochs": 2, "deepspeed_config": {"a": EVIL}}
            lines.append({"kind": kind, "time": time, "step": step - 1, "epoch": 0, **environment})
        time += 36
        values = {"loss": 4 / step, "lr": lr / step, "grad_norm": 0.5, "memory_bytes": 2_000_000}
        lines.append({"kind": "step", "time": time, "step": step, "epoch": epoch, **values})
        if step in (num_steps // 2, num_steps):
            metrics = {
                "training_loss": 5 / step,
                "validation_loss": 6 / step,
                "validation_accuracy": step / num_steps,
                "best_validation_accuracy": step / num_steps,
                "training_duration": "0:00:01",
                "worker_0_memory_MB": 100.0,
            }
            line = {"kind": "epoch", "time": time, "step": step, "epoch": epoch}
            lines.append({**line, "metrics": metrics})
    warning = {"kind": "warning", "time": time, "step": num_steps, "epoch": 1, "logger": "a"}
    lines += [{**warning, "message": EVIL}] * 2
    (directory / FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_size_of_a_checkpoint_is_that_of_its_own_files(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "file").write_text("x" * 10_000)
    (directory / "checkpoint_e1_b0").mkdir()
    (directory / "checkpoint_e1_b0" / "file").write_text("x" * 100)
    (directory / "checkpoint_e1_b0" / "link").symlink_to(tmp_path / "big")
    (directory / "checkpoint_e2_b0").symlink_to(tmp_path / "big")
    checkpoints = Run(str(directory)).checkpoints()
    sizes = {checkpoint.name: checkpoint.num_bytes for checkpoint in checkpoints}
    assert sizes == {"checkpoint_e2_b0": 0, "checkpoint_e1_b0": 100}


def test_a_run_is_read(tmp_path: Path) -> None:
    run = Run(str(write_run(tmp_path / "run")))
    # Without the time between the crash and the recovery.
    assert run.lines[-1].hours == pytest.approx(8 * 36 / 3600)
    assert run.final_metrics["validation_loss"] == 0.75
    assert run.environment["kind"] == "recover"
    assert run.warnings() == {f"a: {EVIL}": 2}
    assert run.state == "stopped"
    checkpoint = tmp_path / "run" / "checkpoint_e1_b2"
    checkpoint.mkdir()
    (checkpoint / "state").write_bytes(b"12345")
    (tmp_path / "run" / "checkpoint_e1_b3.unfinished").mkdir()
    (found,) = run.checkpoints()
    assert (found.name, found.epochs, found.steps, found.num_bytes) == (checkpoint.name, 1, 2, 5)
    (tmp_path / "run" / "model.tar.gz").touch()
    assert run.state == "finished"


def test_charts_have_what_was_written(tmp_path: Path) -> None:
    directories = [write_run(tmp_path / "a"), write_run(tmp_path / "b", num_steps=4)]
    found = charts([Run(str(directory)) for directory in directories])
    assert list(found) == [
        "Loss",
        "Accuracy",
        "Learning rate",
        "Gradient norm",
        "Memory per worker (GB)",
    ]
    curves = {(curve.run, curve.kind): curve for curve in found["Loss"]}
    assert len(curves) == 6
    assert curves[0, "training steps"].values == [4 / step for step in range(1, 9)]
    assert curves[1, "validation"].values == [3, 1.5]
    assert curves[1, "validation"].steps == [2, 4]
    assert curves[1, "validation"].hours == pytest.approx([0.02, 0.04])
    assert {curve.kind for curve in found["Accuracy"]} == {"validation"}
    assert found["Memory per worker (GB)"][0].values == [0.002] * 8


def figures(html: str) -> Dict[str, Dict[str, Any]]:
    """The attributes of each chart over optimizer steps, by its title."""
    found = re.search(r"const docs_json = '(.*)';$", html, flags=re.MULTILINE)
    assert found is not None
    (document,) = json.loads(found[1].replace("\\\\", "\\")).values()
    (tabs,) = document["roots"]
    by_step = tabs["attributes"]["tabs"][0]["attributes"]["child"]["attributes"]["children"]
    attributes = [figure["attributes"] for figure in by_step]
    return {each["title"]["attributes"]["text"]: each for each in attributes}


def legend(figure: Dict[str, Any]) -> List[str]:
    found = [each for each in figure.get("below", []) if each["name"] == "Legend"]
    items = [item for each in found for item in each["attributes"]["items"]]
    return [item["attributes"]["label"]["value"] for item in items]


def test_a_legend_has_what_tells_curves_apart(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    one, two = figures(page(runs[:1])), figures(page(runs))
    assert legend(one["Loss"]) == ["training steps", "training", "validation"]
    assert legend(one["Accuracy"]) == ["validation"]
    assert legend(one["Learning rate"]) == []
    assert legend(two["Accuracy"]) == ["a, validation", "b, validation"]
    assert legend(two["Learning rate"]) == ["a", "b"]


def test_a_constant_value_is_in_the_middle_of_an_axis_of_its_size(tmp_path: Path) -> None:
    found = figures(page([str(write_run(tmp_path / "run"))]))
    assert found["Gradient norm"]["y_range"]["attributes"]["default_span"] == 0.5
    assert found["Memory per worker (GB)"]["y_range"]["attributes"]["default_span"] == 0.002


def test_the_test_set_and_the_best_epoch_are_as_on_the_console(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with open(directory / FILE_NAME, "a") as file:
        metrics = {"best_epoch": 1, "best_validation_accuracy": 0.75}
        line = {"kind": "epoch", "step": 8, "epoch": 1, "metrics": metrics}
        file.write(json.dumps(line) + "\n")
    row = re.compile(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>")
    assert not any(name.startswith("test_") for name, _ in row.findall(page([str(directory)])))
    metrics = {**metrics, "test_accuracy": 0.625, "test_loss": None}
    (directory / "metrics.json").write_text(json.dumps(metrics))
    rows = dict(row.findall(page([str(directory)])))
    assert (rows["best_epoch"], rows["test_accuracy"]) == ("2", "0.625")
    assert "test_loss" not in rows


def test_axes_have_names(tmp_path: Path) -> None:
    for title, figure in figures(page([str(write_run(tmp_path / "run"))])).items():
        below, left = (
            next(axis for axis in figure[side] if "Axis" in axis["name"])
            for side in ("below", "left")
        )
        assert below["attributes"]["axis_label"] == "optimizer steps"
        assert left["attributes"]["axis_label"] == title


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    num_steps = 30_000
    run = Run(str(write_run(tmp_path / "run", num_steps)))
    found = charts([run])
    assert sum(len(curve.values) for curves in found.values() for curve in curves) <= 20_000
    curve = found["Loss"][0]
    assert curve.steps[-1] == num_steps
    first = curve.steps[0]
    assert curve.values[0] == pytest.approx(sum(4 / step for step in range(1, first + 1)) / first)
    assert len(page([str(tmp_path / "run")])) < 2_000_000


def test_differences_name_what_is_not_the_same() -> None:
    configs: List[Dict[str, Any]] = [
        {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": 1}], "f": None, "g": {}},
        {"a": {"b": 1.5, "c": [1, 2]}, "d": [{"e": 2}], "g": {}},
    ]
    expected = {"a.b": ["1", "1.5"], "d.0.e": ["1", "2"], "f": ["null", None]}
    assert differences(configs) == expected
    assert differences(configs[:1]) == {}


def test_lines_of_other_versions_are_passed_over(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with open(directory / FILE_NAME, "a") as file:
        for line in (
            {"kind": "checkpoint", "step": 2, "epoch": 0},
            {"kind": "epoch", "step": 8, "epoch": 1},
            {"kind": "epoch", "step": 8, "epoch": 1, "metrics": {"training_loss": 10**400}},
            {"kind": "new", "step": 8, "epoch": 1, "time": None},
        ):
            file.write(json.dumps(line) + "\n")
    assert Run(str(directory)).num_steps == 8
    assert "<td>8</td>" in page([str(directory)])


DEEP = "[" * 500 + "]" * 500
STEP = {"kind": "step", "step": 8, "epoch": 1, "loss": 0.5}
EPOCH = {"kind": "epoch", "step": 8, "epoch": 1}
START = {"kind": "start", "step": 0, "epoch": 0}
NUMBERS = ("NaN", "Infinity", "-1", "1e400", str(2**70), "1" * 5000, '"8"', "null", "[8]", "{}")

HOSTILE = [
    *(json.dumps(line)[:-1] + f', "step": {n}}}' for line in (STEP, EPOCH) for n in NUMBERS),
    *(json.dumps(STEP)[:-1] + f', "epoch": {n}}}' for n in NUMBERS),
    *(json.dumps(STEP)[:-1] + f', "time": {n}}}' for n in (*NUMBERS, "true", "-1e300", "1e300")),
    *(json.dumps(STEP)[:-1] + f', "loss": {n}}}' for n in (*NUMBERS, "true")),
    *(json.dumps({**EPOCH, "metrics": m}) for m in (0, 1, "a", [1], [["a", 1]], {"": {}}, True)),
    *(
        json.dumps({**EPOCH, "metrics": {f"training_{name}": 1.0, "training_loss": value}})
        for name, value in (
            ("", "a"),
            (EVIL, [1]),
            ("$$x$$", None),
            ("@{y}", {}),
            ("\ud800", 1e308),
            ("\x00", -1e308),
            ("n" * 5000, True),
        )
    ),
    *(json.dumps({"kind": kind, "step": 8, "epoch": 1}) for kind in (1, None, ["step"], {}, EVIL)),
    *(json.dumps({**START, "hosts": hosts}) for hosts in (1, "a", [1, [2]], {"a": 1}, [None])),
    *(json.dumps({**START, "versions": value}) for value in (1, "a", ["torch"], {"torch": [1]})),
    *(json.dumps({**START, "deepspeed_config": value}) for value in (1, "a", [1], {"\ud800": 1})),
    *(json.dumps({**START, key: [EVIL]}) for key in ("num_epochs", "world_size", "precision")),
    *(json.dumps({**STEP, "kind": "warning", "message": value}) for value in (1, None, [EVIL])),
    *(
        json.dumps({**STEP, "kind": "completions", "completions": value})
        for value in (1, None, "a", [1], [{}], [{"prompt": EVIL, "response": [EVIL]}])
    ),
    json.dumps(START)[:-1] + f', "deepspeed_config": {{"a": {DEEP}}}}}',
    "[" * 100_000,
    '{"a":' * 100_000,
    *("[]", "{}", "1", "null", '"a"', "\x00", "\ufeff{}"),
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: line[:60])
def test_a_line_that_no_training_writes_hides_no_other(line: str, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with open(directory / FILE_NAME, "a") as file:
        file.write(line + "\n")
    try:
        html = page([str(directory)])
    except ConfigurationError as error:
        assert DEEP[:100] in line and "nested too deeply" in error.message
        return
    assert '"text":"Accuracy"' in html and EVIL not in html
    html.encode()


@pytest.mark.parametrize(
    "text", ["[1]", "1", "null", '"a"', '{"\\ud800": "\\ud800"}', '{"a": NaN}']
)
def test_a_config_that_allennlp_has_not_written_is_shown(text: str, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    (runs[0] / "config.json").write_text(text)
    page([str(run) for run in runs]).encode()


@pytest.mark.parametrize("content", [b"\xff", b"{", b'{"a":' * 100_000])
def test_a_config_that_can_not_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(directory)):
        page([str(directory)])


def test_what_runs_have_written_is_text(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / EVIL.replace("/", "_"))), str(write_run(tmp_path / "run"))]
    html = page(runs)
    assert EVIL not in html
    assert "<script>document.title" not in html
    own = html[html.index("</head>") :]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own), "It needs the network."


def test_completions_of_the_last_validations_are_shown(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with open(directory / FILE_NAME, "a") as file:
        for epoch in range(12):
            completion = {"prompt": "<user> a", "response": f"b{epoch}.", "finish_reason": "stop"}
            line = {"kind": "completions", "step": 8, "epoch": epoch, "completions": [completion]}
            file.write(json.dumps(line) + "\n")
    html = page([str(directory), str(write_run(tmp_path / "other"))])
    assert re.findall(r"<td>b(\d+)\.</td>", html) == [str(epoch) for epoch in range(11, 1, -1)]
    assert html.count("<td>&lt;user&gt; a</td>") == 10


@requires_chromium
def test_a_browser_shows_it(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.25)]
    path = tmp_path / "report.html"
    path.write_text(page([str(run) for run in runs]))
    shown = show(path, tmp_path, 1400, 2500)
    assert "taken over</title>" not in shown.document
    assert [message for message in shown.messages if "[bokeh" not in message] == []
    assert shown.num_pixels(BLUE) > 300
    assert shown.num_pixels(ORANGE) > 300


# Where charts are, and how far the lines of their legends reach, in pixels.
MEASURE = """<script>
const within = (root, name) => [...root.querySelectorAll("*")].flatMap(element => [
  ...(element.classList.contains(name) && element.offsetWidth > 0 ? [element] : []),
  ...(element.shadowRoot ? within(element.shadowRoot, name) : []),
]);
setInterval(() => {
  if (!Bokeh.documents.length || !Bokeh.documents[0].is_idle) return;
  document.body.dataset.charts = JSON.stringify(within(document, "bk-Figure").map(figure => [
    figure.getBoundingClientRect().left,
    figure.getBoundingClientRect().right,
    ...within(figure.shadowRoot, "bk-label").map(label => label.getBoundingClientRect().right),
  ]));
}, 50);
</script>"""


@requires_chromium
@pytest.mark.parametrize("width, num_columns", [(1300, 2), (500, 1)])
def test_charts_and_legends_fit_the_page(width: int, num_columns: int, tmp_path: Path) -> None:
    names = ("a", "a_directory_that_has_the_arguments_of_its_run_in_its_name_lr_0.0003_seed_1")
    runs = [str(write_run(tmp_path / name)) for name in names]
    path = tmp_path / "report.html"
    path.write_text(page(runs) + MEASURE)
    shown = show(path, tmp_path, width, 4000)
    measured = re.search(r'data-charts="(.*?)"', shown.document)
    assert measured is not None
    charts_of_page = json.loads(measured[1])
    assert len({left for left, *_ in charts_of_page}) == num_columns
    # Those of the hidden tab have the same places.
    assert sum(len(labels) for _, _, *labels in charts_of_page) == 2 * 14
    for _, right, *labels in charts_of_page:
        assert max(right, *labels) <= width
        assert max(labels) <= right
