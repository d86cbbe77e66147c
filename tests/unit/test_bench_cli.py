"""`sglang-ext bench`: the grid, what a results file allows, and refusals."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sglang_ext.bench_cli import grid
from sglang_ext.bench_cli.markdown import BEGIN, END, placed, table
from sglang_ext.bench_cli.plots import plot
from sglang_ext.bench_cli.results import Results
from sglang_ext.bench_cli.tools import Load
from sglang_ext.bench_cli.turns import averaged
from sglang_ext.cli import app
from sglang_ext.inputs import InputError
from sglang_ext.launcher import catalog
from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.report import NOT_SHOWN
from sglang_ext.planner.acceptance import Curve, constant_rate
from sglang_ext.planner.layout import Layout
from sglang_ext.planner.search import Question, predict
from sglang_ext.planner.shape import read_shape

ARGV = ("--model-path", "m")
CONVERSATION = json.dumps({"conversations": [{"content": "a"}, {"content": "b"}]}) + "\n"


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def _points() -> list[grid.Point]:
    chosen = grid.settings(["DSPARK=d"], [3, 7])
    return grid.points(chosen, [grid.Dataset("random")], (1, 4))


def _figures(speed: float) -> dict[str, float]:
    return {"output_tokens_per_second": speed, "median_tpot_ms": 1e3 / speed}


def test_settings_and_their_flags() -> None:
    none, three, seven = grid.settings(["dspark=d"], [3, 7])
    assert none.flags == []
    assert three.key == "DSPARK, gamma 3, d"
    assert seven.flags == [
        "--speculative-algorithm",
        "DSPARK",
        "--speculative-draft-model-path",
        "d",
        "--speculative-num-draft-tokens",
        "8",
    ]


def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out, load = tmp_path / "b.json", Load()
    points = _points()
    first = Results(out, ARGV, load)
    assert first.missing(points) == points
    first.keep_point(points[0], _figures(10))
    first.keep_point(points[2], _figures(15) | {"acceptance_length": 2.2})
    again = Results(out, ARGV, load)
    assert again.missing(points) == [points[1], *points[3:]]
    ratios = {(r["algorithm"], r["gamma"]): r["ratio"] for r in again.ratios()}
    assert ratios == {("none", None): 1.0, ("DSPARK", 3): 1.5}
    assert table(again).splitlines()[:4] == [
        "| data | at a time | no speculation, tok/s | DSPARK, 3 drafts, tok/s (ratio, acceptance "
        "length) |",
        "|---|---|---|---|",
        "| random | 1 | 10.0 | 15.0 (1.50x, 2.20) |",
        "",
    ]
    plot(again.ratios(), tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_the_base_has_a_second_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are against the mean of both, and a drift is said; a run that goes on repeats none."""
    out, started = tmp_path / "b.json", []

    class Server(_NoServer):
        def __init__(self, argv: list[str], *rest: object) -> None:
            started.append("--speculative-algorithm" in argv)
            super().__init__(argv, *rest)

    speeds = iter([10.0, 15.0, 14.0])
    monkeypatch.setattr("sglang_ext.bench_cli.tools.measure", lambda *_: _figures(next(speeds)))
    monkeypatch.setattr("sglang_ext.lossless.servers.LaunchedServer", Server)
    monkeypatch.setattr(Results, "passed", lambda *_: True)
    words = ("--out", out, "--with", "NGRAM", "--concurrency", "1", "--", *ARGV)
    done = _run(*words)
    assert done.exit_code == 0, done.output
    assert started == [False, True, False]
    assert "had changed by +40% to +40%" in done.output
    rows = Results(out, ARGV, Load(**json.loads(out.read_text())["load"])).ratios()
    found = [(r["algorithm"], r["output_tokens_per_second"], r["ratio"]) for r in rows]
    assert found == [("none", 12.0, 1.0), ("NGRAM", 15.0, 1.25)]
    assert _run(*words).exit_code == 0
    assert len(started) == 3
    # Another setting, later: the base's second turn comes after it.
    speeds = iter([15.0, 10.0])
    assert _run("--gamma", "2", *words).exit_code == 0
    assert started[3:] == [True, False]
    load = Load(**json.loads(out.read_text())["load"])
    assert Results(out, ARGV, load).ratios()[0]["output_tokens_per_second"] == 10.0


def test_a_file_of_one_turn_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to measure: no server starts, whatever machine it was."""
    out, page = tmp_path / "b.json", tmp_path / "b.md"
    results = Results(out, ARGV, Load())
    for point in grid.points(grid.settings(["NGRAM"], [None]), [grid.Dataset("random")], (1,)):
        results.keep_point(point, _figures(10.0))
    del results.data["again"]
    out.write_text(json.dumps(results.data | {"machine": {**results.data["machine"], "cpus": 999}}))
    monkeypatch.setattr("sglang_ext.lossless.servers.LaunchedServer", None)
    words = ("--out", out, "--markdown", page, "--with", "NGRAM", "--concurrency", "1")
    done = _run(*words, "--", *ARGV)
    assert done.exit_code == 0, done.output
    assert "10.0 (1.00x)" in page.read_text()


def test_figures_of_both_turns_are_averaged() -> None:
    first = {"a": {"speed": 10.0, "completed": 8, "file": None}, "b": {"speed": 1.0}}
    found = averaged(first, {"a": {"speed": 14.0, "completed": 8, "file": None}})
    assert found == {"a": {"speed": 12.0, "completed": 8, "file": None}, "b": {"speed": 1.0}}


def test_the_table_says_what_it_was_measured_on(tmp_path: Path) -> None:
    argv = ["--model-path", "/a/b/Model-1B", "--dtype", "bfloat16"]
    results = Results(tmp_path / "b.json", argv, Load(chat=True))
    setting = grid.settings(["DSPARK=d"], [3])[1]
    said = f"lossless within what was tested (3 of 3 checks passed); {NOT_SHOWN}"
    results.data["gates"][setting.key] = {**asdict(setting), "exit_code": 0, "statement": said}
    for many in (1, 4):
        (point,) = grid.points([setting], [grid.Dataset("a|b")], (many,))
        figures = _figures(10) | {"completed": 8, "input_tokens": 50 + many}
        results.keep_point(point, figures)
    machine = results.data["machine"]
    machine |= {"cpu": "Some CPU", "cpus": 2, "threads": 1, "sglang": "1", "sglang_ext": "2"}
    rows, caption = table(results).split("\n\n")
    assert "| a\\|b | 4 | - | 10.0 |" in rows
    for part in (
        "Model-1B, `--dtype bfloat16`.", "Some CPU, 2 CPUs, 1 thread, load average ",
        "; SGLang 1, sglang-ext 2, torch ", "bench_serving, 8 requests a point, 51 to 54 tokens in",
        "128 out, greedy, in chat format", "DSPARK, 3 drafts: lossless within what was tested (3 ",
    ):  # fmt: skip
        assert part in caption, part
    assert NOT_SHOWN not in caption


def test_the_table_takes_its_place_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(placed("one\n", page))
    assert page.read_text() == f"{BEGIN}\none\n{END}\n"
    page.write_text(f"# A page\n{BEGIN}\nold\n{END}\n\nmore\n")
    assert placed("new\n", page) == f"# A page\n{BEGIN}\nnew\n{END}\n\nmore\n"
    for text in ("# A page\n", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"):
        page.write_text(text)
        result = _run("--markdown", page, "--", *ARGV)
        assert result.exit_code == 2
        assert "--markdown: expected a new page, or one with <!--" in result.output
        assert page.read_text() == text


def test_points_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    Results(out, ARGV, Load()).keep_point(_points()[0], _figures(1))
    results = Results(out, ARGV, Load())
    results.require_this_machine()
    results.data["machine"]["torch"] = "1.0"
    with pytest.raises(CannotTest, match=r"machine, torch: expected 1\.0"):
        results.require_this_machine()


def test_another_draft_or_file_is_measured_anew(tmp_path: Path) -> None:
    results = Results(tmp_path / "b.json", ARGV, Load())
    none, mine, other = grid.settings(["DSPARK=d", "DSPARK=e"], [3])
    results.data["gates"][mine.key] = {**asdict(mine), "exit_code": 0, "statement": ""}
    assert results.passed(mine)
    assert not results.passed(other)
    for name in ("a", "b"):
        (tmp_path / name).write_text(CONVERSATION)
    data = [grid.datasets([f"x={tmp_path / name}"])[0] for name in ("a", "b")]
    points = grid.points([none, mine, other], data, (1,))
    for point, speed in zip(points, (10, 20, 15, 40, 25), strict=False):
        results.keep_point(point, _figures(speed))
    assert Results(tmp_path / "b.json", ARGV, Load()).missing(points) == points[-1:]
    a, b = (f"x={tmp_path / name}" for name in ("a", "b"))
    assert [(r["server"], r["data"], r["ratio"]) for r in results.ratios()] == [
        ("none", a, 1.0),
        ("none", b, 1.0),
        ("DSPARK, 3 drafts, d", a, 1.5),
        ("DSPARK, 3 drafts, d", b, 2.0),
        ("DSPARK, 3 drafts, e", a, 2.5),
    ]


def test_a_draft_of_a_folder_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path)
    assert grid.settings(["DSPARK=d"], [None])[1].draft == str(tmp_path / "d")


def test_a_setting_needs_its_gate(tmp_path: Path) -> None:
    results = Results(tmp_path / "b.json", ARGV, Load())
    none, three, _ = grid.settings(["DSPARK=d"], [3, 7])
    assert results.passed(none)
    assert not results.passed(three)
    results.data["gates"][three.key] = {"exit_code": 1}
    assert not results.passed(three)
    results.data["gates"][three.key] = {"exit_code": 0}
    assert results.passed(three)


def test_refuses_results_of_other_loads(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    Results(out, ARGV, Load()).keep_point(_points()[0], _figures(1))
    for argv, load in ((("--model-path", "n"), Load()), (ARGV, Load(output_tokens=9))):
        with pytest.raises(CannotTest, match="Give another --out"):
            Results(out, argv, load)
    out.write_text(json.dumps({"points": []}))
    with pytest.raises(CannotTest, match="expected results of bench"):
        Results(out, ARGV, Load())
    first = Results(tmp_path / "c.json", ARGV, Load())
    first.keep_point(_points()[0], _figures(1))
    del first.data["points"][_points()[0].key]["draft"]
    out.write_text(json.dumps(first.data))
    with pytest.raises(CannotTest, match="an earlier version"):
        Results(out, ARGV, Load())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a conversation of two turns"),
        ("\n", "expected a conversation of two turns"),
        ('{"conversations": [{"content": "a"}]}', "expected a conversation of two turns"),
        (CONVERSATION + "{", "line 2: expected JSON"),
        (CONVERSATION + "5", "line 2: expected an object"),
        (CONVERSATION + '{"conversations": [{"content": 5}, {}]}', "line 2: expected turns"),
        ("[" * 100_000, "line 1: expected JSON"),
    ],
)
def test_a_damaged_data_set_is_refused_before_a_server_starts(
    text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(CannotTest, match=said):
        grid.datasets([f"x={file}"])


@pytest.mark.parametrize("place", ["machine", "gates", "points", "again"])
def test_a_damaged_results_file_is_refused_or_shown(place: str, tmp_path: Path) -> None:
    """Every field of it left out or of an odd value: no traceback where the tables are written."""
    out = tmp_path / "b.json"
    results = Results(out, ARGV, Load())
    setting = _points()[0].setting
    gate = {**asdict(setting), "exit_code": 0, "statement": "s"}
    results.data["gates"][setting.key] = gate
    results.keep_point(_points()[0], _figures(1))
    results.data["again"] = dict(results.data["points"])
    whole = json.dumps(results.data)
    kept = json.loads(whole)[place]
    for name in kept if place == "machine" else next(iter(kept.values())):
        for value in (..., None, "x", -1, 10**400, True, [], {}):
            data = json.loads(whole)
            at = data[place] if place == "machine" else next(iter(data[place].values()))
            at.pop(name)
            if value is not ...:
                at[name] = value
            out.write_text(json.dumps(data))
            with suppress(CannotTest, InputError):
                assert table(Results(out, ARGV, Load()))


REFUSED = {
    "speculative flag": (("--", "--speculative-algorithm", "X"), "without speculation"),
    "port": (("--", "--port", "1"), "ports are chosen"),
    "no draft": (("--with", "DSPARK", "--", "--model-path", "m"), "expected ALGORITHM=DRAFT"),
    "data set": (("--dataset", "sharegpt", "--", "--model-path", "m"), "name a local file"),
    "algorithm": (("--with", "DSPRK=x", "--", "--model-path", "m"), "Did you mean DSPARK"),
    "one name": (("--dataset", "code", "--dataset", "code", "--", "--model-path", "m"), "twice"),
    "no file": (("--dataset", "x=/no/such", "--", "--model-path", "m"), "expected a file"),
    "gamma": (("--gamma", "a", "--", "--model-path", "m"), "--gamma: expected numbers"),
    "tool": (("--tool", "wrk", "--", "--model-path", "m"), "--tool: expected one of"),
    "prompts of one batch": (("--tool", "one-batch", "--prompts", "4"), "--prompts: expected none"),
    "chat of ids": (("--dataset", "random", "--chat"), "--chat: expected none"),
    "length of texts": (("--dataset", "code", "--input-tokens", "9"), "--input-tokens: expected n"),
    "gamma of nothing": (("--gamma", "3", "--", "--model-path", "m"), "--gamma: expected none"),
    "two tools": (("--tool", "serving,one-batch"), "--tool: expected one"),
    "one file": (("--out", "x.md", "--markdown", "x.md"), "another file than --out"),
    "folder": (("--out", "/no/such/x.json", "--", "--model-path", "m"), "--out: expected a file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    args, message = REFUSED[name]
    result = _run(*args)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_the_unexpected_is_no_lossy_setting_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that breaks on the second point: the first is kept, and the next run starts there."""
    out, asked = tmp_path / "b.json", []

    def measured(url: str, point: grid.Point, load: Load) -> dict[str, float]:
        asked.append(point.concurrency)
        if len(asked) == 2:
            raise IndexError("no\nsuch row")
        return _figures(10.0)

    monkeypatch.setattr("sglang_ext.bench_cli.tools.measure", measured)
    monkeypatch.setattr("sglang_ext.lossless.servers.LaunchedServer", _NoServer)
    words = ("--out", out, "--concurrency", "1,4", "--", *ARGV)
    broken = _run(*words)
    assert broken.exit_code == 2
    *_, said = broken.output.splitlines()
    assert said == (
        "could not measure: unexpected IndexError: no such row. "
        f"What was measured is in {out}; run it again to go on."
    )
    assert _run(*words).exit_code == 0
    assert asked == [1, 4, 4]


class _NoServer:
    def __init__(self, *_: object) -> None:
        self.url = "http://nowhere"

    def wait_ready(self) -> None:
        pass

    def stop(self) -> None:
        pass


def _kept(out: Path, speeds: dict[str, float], length: float) -> None:
    """Results of the built-in model, one load, a point per algorithm."""
    results = Results(out, ("--model-path", "m", "--tp-size", "1"), Load())
    for setting in grid.settings(["DSPARK=d", "NGRAM"], [3]):
        (point,) = grid.points([setting], [grid.Dataset("random")], (4,))
        figures = _figures(speeds.get(setting.algorithm, 1.0)) | {"input_tokens": 256}
        results.keep_point(point, figures | {"acceptance_length": length})


def test_results_are_what_plan_validates(tmp_path: Path) -> None:
    """Speeds as predicted have no error, and exchanged ones are ranked wrong."""
    model, machine = catalog.model("demo"), catalog.hardware("cpu")
    rates = Curve((constant_rate(2.0, 3),) * 3, "measured", "a test")
    load = catalog.Load(256, 128, 4)
    shape = read_shape(model.config, model.name)
    plain, drafted = (
        predict(Question(model, machine, load, curve=rates), shape, layout).throughput
        for layout in (Layout(1, 1), Layout(1, 1, algorithm="dspark", gamma=3))
    )
    assert plain != drafted
    out = tmp_path / "b.json"
    words = ["plan", "--validate", str(out), "--model", "demo", "--hardware", "cpu", "--json"]
    for speeds, right in (((plain, drafted), 1), ((drafted, plain), 0)):
        out.unlink(missing_ok=True)
        _kept(out, dict(zip(("none", "DSPARK"), speeds, strict=True)), 2.0)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        found = json.loads(result.output)
        assert (found["pairs"], found["ranked_right"]) == (1, right)
        assert (found["left_out"], found["basis"]) == (["NGRAM"], "assumed")
        (error,) = (r["median"] for r in found["regions"] if r["metric"] == "throughput")
        assert (error == pytest.approx(0.0)) is bool(right)
    for missing in ("--model", "--hardware"):
        at = words.index(missing)
        result = CliRunner().invoke(app, words[:at] + words[at + 2 :])
        assert result.exit_code == 2
        assert f"plan, {missing}: expected what" in result.output
    lines = tmp_path / "b.jsonl"
    lines.write_text("{}\n{}\n")
    result = CliRunner().invoke(app, [*words[:2], str(lines), *words[3:]])
    assert result.exit_code == 2
    assert "name their own" in result.output
