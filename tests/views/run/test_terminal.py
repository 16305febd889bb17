"""The table of a run in the terminal: what it says, and what it leaves out where there is little room."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from statistics import median

import pytest
from tests.helpers.report_helpers import KINDS, transformer_run

from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.summary import summarise
from equilibria.findings import Finding
from equilibria.views._rich import collected_text, columns_table, text_console
from equilibria.views.run import terminal
from equilibria.views.run.terminal import run_table

LAYER = LayerSummary(
    name="layer3.5.conv2.weight",
    samples=20,
    last_step=99,
    angle=0.0103456,
    angle_predicted=0.0073,
    angle_equilibrium=0.00725,
    angle_vs_predicted=1.417,
    angle_vs_equilibrium=1.43,
    norm=1.23456,
    norm_predicted=1.2,
    norm_equilibrium=1.7,
    norm_vs_predicted=1.03,
    norm_vs_equilibrium=0.72,
    cosine=1e-5,
    invariant=True,
    state="settling",
    steps_to_settle=2099.2,
    epochs_to_settle=5.37,
    lr=0.1,
    weight_decay=5e-4,
    momentum=0.9,
    settings="SGD(lr=0.1, wd=0.0005, momentum=0.9)",
    no_law=None,
    how_wrong=0.35,
)
OTHERS = {
    "layer1.0.conv1.weight": {"state": "settled", "how_wrong": 0.01, "angle_vs_predicted": 1.01},
    "layer1.0.conv2.weight": {"state": "disturbed", "how_wrong": 0.02, "epochs_to_settle": None, "angle": 7.25e-5},
    "fc.weight": {
        "invariant": False,
        "state": "none",
        "how_wrong": None,
        "angle_predicted": None,
        "angle_vs_predicted": None,
        "norm_equilibrium": None,
        "steps_to_settle": None,
    },
    "embed.weight": {"no_law": "no law for RMSprop", "state": "none", "how_wrong": None},
    "free.weight": {"state": "none", "weight_decay": 0.0, "how_wrong": 0.0, "steps_to_settle": None},
}
LAYERS = [LAYER, *(dataclasses.replace(LAYER, name=name, **changes) for name, changes in OTHERS.items())]


@pytest.fixture
def printed(monkeypatch):
    """The lines of the table in a terminal of some width, from the headings on; all below it if findings are given."""

    def lines(width, layers=LAYERS, findings=None):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = run_table(layers, findings=findings or ()).splitlines()
        headings = next((place for place, line in enumerate(shown) if re.match("layer .*rad/step", line)), 0)
        if layers and findings is None:
            shown = shown[: shown.index("", headings)]
        return [line for line in shown[headings:] if line]

    return lines


@pytest.mark.parametrize("width", [60, 80, 100])
def test_one_line_per_layer_that_fits(printed, width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    names = [line.split()[0] for line in lines]
    assert names[:7] == [
        "layer",
        *(layer.name.removesuffix(".weight") for layer in LAYERS),  # in the order of the model
    ]
    assert lines[7].startswith("root mean square of") and lines[8].startswith(("predicted: ", "equilibrium: "))
    states = ["settling", "settled", "disturbed", "not invariant", "no law", "no decay"]
    assert all(line.endswith(state) for line, state in zip(lines[1:7], states, strict=True))


def test_the_numbers_at_80_columns(printed):
    lines = printed(80)
    assert lines[0].split() == [
        "layer",
        "rad/step",
        "predicted",
        "ratio",
        "equilibrium",
        "norm",
        "ep.",
        "left",
        "state",
    ]
    assert lines[1].split() == ["layer3.5.conv2", "0.0103", "0.0073", "1.42", "0.00725", "1.23", "5.4", "settling"]
    assert lines[3].split() == ["layer1.0.conv2", "7.25e-05", "0.0073", "1.42", "0.00725", "1.23", "2,100", "disturbed"]
    assert lines[2].split() == ["layer1.0.conv1", "0.0103", "0.0073", "1.01", "0.00725", "1.23", "settled"]
    assert lines[4].split() == ["fc", "0.0103", "0.00725", "1.23", "not", "invariant"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_equilibrium_is_kept_where_there_is_little_room(printed, width):
    """Less telling columns go first."""
    long = [dataclasses.replace(layer, name=f"encoder.{layer.name}") for layer in LAYERS]
    for layers in (LAYERS, long):
        titles = printed(width, layers)[0].split()
        assert {"rad/step", "ratio", "equilibrium", "state"} <= set(titles)
    assert "norm*" in printed(120)[0].split()


def transformer(blocks, **options):
    samples, metadata = transformer_run(blocks, **options)
    return summarise(samples, metadata=metadata)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_siblings_share_a_row_with_their_range(printed, width):
    layers = transformer(12, fast={0: 2.0})
    lines = printed(width, layers)
    assert max(map(len, lines)) <= width
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:7]}
    assert list(rows) == ["transformer.wte", "transformer.wpe", *(f"transformer.h.*.{kind}" for kind in KINDS)]
    assert lines[0].split()[:4] == ["layer", "n", "rad/step", "range"]
    kind = [layer.angle for layer in layers if layer.name.endswith("mlp.c_fc.weight")]
    shown = rows["transformer.h.*.mlp.c_fc"]
    assert shown[0] == "12"
    assert float(shown[1]) == pytest.approx(median(kind), rel=1e-2)
    assert [float(end) for end in shown[2].split("..")] == pytest.approx([min(kind), max(kind)], rel=0.05)
    assert shown[-2:] == ["not", "invariant"]
    below = " ".join(lines[7:])
    assert re.search(r"against the median of their siblings: transformer\.h\.0 \(4 layers\) [\d.]+x the angle$", below)


def test_states_of_siblings_are_counted(printed):
    names = [f"h.{block}.{kind}.weight" for block in range(5) for kind in "abc"]
    states = ["settled", "settled", "settled", "settling", "settling"]
    rows = [dataclasses.replace(LAYER, name=name, state=states[int(name.split(".")[1])]) for name in names]
    lines = printed(100, rows)
    assert [line.split()[0] for line in lines[1:4]] == ["h.*.a", "h.*.b", "h.*.c"]
    assert all(line.endswith("3 settled, 2 settling") for line in lines[1:4])
    rows[0] = dataclasses.replace(rows[0], state="disturbed")
    assert printed(100, rows)[1].endswith("2 settled, 2 settling, 1 disturbed")


def test_equilibria_of_siblings_that_are_far_apart_are_a_range(printed):
    rows = [
        dataclasses.replace(LAYER, name=f"h.{block}.{kind}.weight", angle_equilibrium=0.001 * (scale if block else 1))
        for kind, scale in zip("abc", (1, 1.9, 2.1), strict=True)
        for block in range(5)
    ]
    title, *lines = printed(100, rows)[:4]
    ends = title.index("equilibrium") + len("equilibrium")
    assert [line[:ends].split()[-1] for line in lines] == ["0.001", "0.0019", "0.001..0.0021"]


def test_a_cut_table_keeps_the_most_telling_rows_in_the_order_of_the_model(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    layers = [dataclasses.replace(LAYER, name=f"layer{place}", how_wrong=place % 7 / 10) for place in range(20)]
    shown = run_table(layers, findings=(), most=5).splitlines()
    first = next(place for place, line in enumerate(shown) if line.startswith("layer "))
    assert [line.split()[0] for line in shown[first + 1 : first + 6]] == [
        "layer5",
        "layer6",
        "layer12",
        "layer13",
        "layer19",
    ]
    assert "15 more layers are in --json" in shown


def test_names_that_are_no_weights_are_shown_in_full_and_long_ones_are_folded_not_cut(printed):
    rows = [dataclasses.replace(LAYER, name=name) for name in ("conv.weight", "lstm.weight_hh_l0", "conv.weight[12]")]
    assert [line.split()[0] for line in printed(80, rows)[1:4]] == [row.name for row in rows]
    long = dataclasses.replace(LAYER, name="encoder.transformer.blocks.11.attention.output.dense.weight")
    lines = printed(60, [long])
    assert "".join(line.split()[0] for line in lines[1:-2]) == long.name.removesuffix(".weight")


HOWS = {
    "transformer.h.0.attn.c_attn.weight": "jointly with transformer.h.0.ln_1.weight, lm_head.weight and 6 more",
    "transformer.h.0.mlp.c_fc.weight": "jointly with transformer.h.0.mlp.c_fc.bias and against lm_head.weight",
    "transformer.h.0.mlp.c_proj.weight": "against transformer.h.0.mlp.c_fc.weight, transformer.h.0.mlp.c_fc.bias",
    "transformer.h.0.attn.bias.weight": "no effect",
    "lm_head.weight": "no",
    "conv.weight": "rows",
}


@pytest.mark.parametrize("width", [80, 100])
def test_partners_are_counted_and_names_are_not_folded(printed, width):
    """Columns are left out instead; the state does not contradict what is said beside it."""
    free = {name: how for name, how in HOWS.items() if how != "rows"}
    rows = [dataclasses.replace(LAYER, name=name, how=how, invariant=False) for name, how in free.items()]
    lines = printed(width, [*rows, dataclasses.replace(LAYER, name="conv.weight", how="rows")])
    assert max(map(len, lines)) <= width
    shown = {line.split()[0]: " ".join(line.split()[-4:]) for line in lines[1:7]}
    assert shown.keys() == {name.removesuffix(".weight") for name in HOWS}
    assert shown["transformer.h.0.attn.c_attn"].endswith("not alone jointly (9)")
    assert shown["transformer.h.0.mlp.c_fc"].endswith("not alone against (3)")
    assert shown["transformer.h.0.mlp.c_proj"].endswith("not alone against (3)")
    assert shown["transformer.h.0.attn.bias"].endswith("no effect no effect")
    assert shown["lm_head"].endswith("not invariant no")
    assert shown["conv"].endswith("settling rows")
    assert "jointly (n): n may be scaled together" in " ".join(lines[7:])


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0.0, "1.7"), (0.2, "1"), (999.5, "1,000"), (9999, "9,999"), (12345, "12.3k"), (3.21e6, "3.21M"), (1e10, "10G")],
)
def test_long_times_are_short(printed, steps, text):
    (line,) = printed(100, [dataclasses.replace(LAYER, steps_to_settle=steps, epochs_to_settle=None)])[1:2]
    assert line.split()[-2] == text


def test_findings_are_sentences_below(printed):
    findings = [
        Finding("warning", "conv [a]", "is [bold]not[/bold] right " * 5, "change [x] it", "law"),
        Finding("note", "all", "is well", "", ""),
    ]
    lines = printed(60, findings=findings)
    assert "! conv [a]: is [bold]not[/bold] right is [bold]not[/bold]" in lines
    assert "  change [x] it" in lines
    assert lines[-1] == "- all: is well"
    assert max(map(len, lines)) <= 60


def test_without_findings_a_sentence_says_what_that_means(printed):
    settled = dataclasses.replace(LAYER, angle_vs_predicted=1.01, how_wrong=0.01, angle_error=0.01)
    assert "- No findings: The layer that has a prediction turns within 5 % of it, and no" in printed(
        80, [settled], findings=()
    )


def test_columns_without_a_number_are_left_out_with_their_legend(printed):
    nothing = ("angle_predicted", "angle_vs_predicted", "angle_equilibrium", "norm_equilibrium", "steps_to_settle")
    bare = dataclasses.replace(LAYER, invariant=False, how_wrong=None, **dict.fromkeys((*nothing, "epochs_to_settle")))
    lines = printed(100, [bare])
    assert lines[0].split() == ["layer", "rad/step", "norm", "state"]
    assert len(lines) == 3 and lines[2].startswith("root mean square of"), "no legend"


def test_the_footer_names_the_window_of_all_layers(printed):
    def footer(*windows):
        rows = [
            dataclasses.replace(LAYER, name=f"{place}.weight", samples=samples, first_step=first, last_step=last)
            for place, (samples, first, last) in enumerate(windows)
        ]
        return next(line for line in printed(150, rows) if line.startswith("root mean square"))

    assert footer((63, 187, 249), (63, 187, 249)) == "root mean square of 63 samples, steps 187 to 249"
    assert footer((1, 300, 300)) == "root mean square of 1 sample, step 300"
    assert footer((20, 300, 345), (5, 340, 360)) == (
        "root mean square of 5 to 20 samples, steps 300 to 360, of each layer its own last ones"
    )


def test_the_footer_says_that_a_tail_is_left_out(printed):
    tail = dataclasses.replace(LAYER, samples=8, first_step=285, last_step=306, lr=0.01, last_lr=3.43e-5)
    footer = next(line for line in printed(150, [tail]) if line.startswith("root mean square"))
    assert footer.endswith("steps 285 to 306; the tail of the schedule, down to lr 3.43e-5, is left out")


def test_the_legend_explains_rows_of_many_layers_and_predictions_of_the_same_steps(printed):
    rows = [dataclasses.replace(LAYER, name=f"h.{block}.mlp.weight") for block in range(13)]
    text_of = " ".join(printed(150, rows))
    assert "*: one row for the layers of a kind, with their median angle" in text_of
    assert "predicted: for these steps" in text_of and "rad/step now" not in text_of


def test_before_the_first_sample(printed):
    said = " ".join(printed(80, []))
    assert said.startswith(
        "no samples yet: train a few steps first; or the watched optimizer is not the one that steps"
    )


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[" not in run_table(LAYERS, findings=())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = run_table(LAYERS, findings=())
    assert "\033[1m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in run_table(LAYERS, findings=())


def test_rich_and_plotly_are_imported_only_to_show_something():
    code = (
        "import sys\n"
        "import equilibria.views.run.card, equilibria.views.run.page, equilibria.views.run.sharpness\n"
        "import equilibria.views.run.terminal\n"
        "assert not {'rich', 'plotly'} & {name.split('.')[0] for name in sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("gap", [1, 2])
def test_lines_that_need_no_folding_are_those_of_rich(gap):
    columns = {
        "layer": ["conv1", "layer1.0"],
        "norm": ["1.23", ""],
        "state": ["settled", ""],
        "invariant": ["", "rows"],
    }
    out = text_console()
    out.print(columns_table(columns, words=("state", "invariant"), folded="layer", gap=gap))
    lines = terminal._lines(columns, gap=gap, width=80)
    assert [line.rstrip() for line in lines] == collected_text(out).splitlines()


@pytest.mark.parametrize(("name", "width"), [("layer1.0.conv1", 20), ("сеть", 80)])
def test_rich_folds_what_does_not_fit_and_measures_wide_characters(name, width):
    assert terminal._lines({"layer": [name], "state": ["settled"]}, gap=2, width=width) is None


def test_many_kinds_in_mixed_states_keep_the_equilibrium_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    layers = [
        dataclasses.replace(
            LAYER,
            name=f"blocks.{block}.attention.{kind}.weight",
            angle_vs_predicted=0.94 + 0.01 * block,
            law="measured gain",
            gain=1.0,
            state="settling" if block % 3 else "none",
        )
        for kind in ("query", "key", "value", "out")
        for block in range(24)
    ]
    table = str(run_table(layers, findings=()))
    assert "equilibrium" in table.split("root mean square")[0].split("layer ")[-1]
    assert table.count("various") == 4 and max(map(len, table.splitlines())) <= 80
