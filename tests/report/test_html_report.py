"""The report as a page, in a browser: it says the right things, is usable by keyboard, valid, and
asks for nothing.
"""

import argparse
import json
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import SIZES as TINY

import atomc
from atomc.cli import main
from atomc.cli.explain import _names
from atomc.graph.graph_printer import parse
from atomc.loading.create_model import create_model
from atomc.report.records import (
    CacheOutcome,
    FusionOpportunity,
    KernelChoice,
    Miss,
    OpCost,
    Site,
    Stage,
)
from atomc.report.render import formula
from atomc.report.render.compare import Comparison
from atomc.report.render.graph_diff import align, fold_layers, hunks
from atomc.report.render.html import page as html_of
from atomc.report.report import Report

pytestmark = pytest.mark.xdist_group("html report")  # three models are compiled once
LAYERS = 9
MAX_BYTES = 3_000_000


def stock(kind, layers, **more):
    """The report of a stock class of transformers, on meta, for any number of tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers, **(TINY | more))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return atomc.explain(model.eval().requires_grad_(False), dynamic=True)


@pytest.fixture(scope="module")
def qwen3():
    return stock("qwen3", LAYERS)


@pytest.fixture(scope="module")
def fp8_llama():
    from atomc.program import compile_model

    config = TINY | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
    }
    model = atomc.quantize(create_model(config, dtype=torch.bfloat16, device="cpu"), "fp8")
    return compile_model(model.requires_grad_(False), {"glue": "eager"}, keep_texts=True).report


@pytest.fixture(scope="module")
def mixtral():
    return stock("mixtral", 2, num_local_experts=4, num_experts_per_tok=2)


@pytest.fixture
def opened(browser, tmp_path):
    """opened(text, **how) -> the page, from a file; what it says on the console and asks for is in
    said and asked.
    """
    contexts = []

    def show(text, **how):
        path = tmp_path / "report.html"
        path.write_text(text)
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, **how))
        page = contexts[-1].new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()


def cells(page):
    """rewrite -> the texts of its cells."""
    rows = page.query_selector_all(".grid tbody tr:has(.cell)")
    return {
        row.query_selector("th").inner_text(): [
            cell.inner_text() for cell in row.query_selector_all(".cell")
        ]
        for row in rows
    }


def choose(page, selector, value):
    """Move a slider as a hand does."""
    page.evaluate(
        "([selector, value]) => { const slider = document.querySelector(selector); "
        "slider.value = value;"
        "slider.dispatchEvent(new Event('input', {bubbles: true})); }",
        [selector, str(value)],
    )


# ---- three models in a browser


@pytest.mark.rotating
def test_it_fits_a_telephone(opened, qwen3):
    slow = dict.fromkeys(qwen3.phases, 123.456)  # as on a busy machine
    page = opened(html_of([replace(qwen3, phases=slow)]))
    for width in (390, 330):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


# A few of each kind: looking at all of them takes a minute.
OPEN_SOME = """() => {
  for (const some of ["details.pass", "details", ".about details"])
    for (const one of [...document.querySelectorAll(some)].slice(0, 3)) one.open = true;
  for (const one of [...document.querySelectorAll(".more")].slice(0, 3)) one.click();
}"""


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["qwen3", "fp8_llama", "mixtral"])
def test_it_is_accessible_in_light_and_dark_and_asks_for_nothing(name, request, opened, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(html_of([request.getfixturevalue(name)]), color_scheme="light", bypass_csp=True)
    page.evaluate(OPEN_SOME)
    # What is written there is the same in the dark; only its colours are not.
    for scheme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", ground)[0]) < 128) == (scheme == "dark")
        found = axe.run(page, options=options | {"resultTypes": ["violations"]})
        assert found.violations_count == 0, found.generate_report()
        assert found.response["passes"]
        page.screenshot(path=tmp_path / f"{name}-{scheme}.png", full_page=True)
    assert page.said == []
    assert page.asked == [page.url]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name",
    ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp8_llama", "mixtral"))],
)
def test_it_is_valid_html(name, request):
    html5lib = pytest.importorskip("html5lib")
    html5lib.HTMLParser(strict=True).parse(html_of([request.getfixturevalue(name)]))


@pytest.mark.rotating
def test_a_report_that_was_json_has_the_same_page(qwen3):
    assert html_of([Report.of(json.loads(qwen3.to_json()))]) == html_of([qwen3])


@pytest.mark.rotating
def test_layers_that_look_alike_share_a_column(qwen3, opened):
    page = opened(html_of([qwen3]))
    heads = [head.inner_text() for head in page.query_selector_all(".grid thead th")][1:]
    assert heads == ["0", "1-8", "elsewhere"]
    found = cells(page)
    assert sum(int(number) for number in found["rms_norm"] if number.isdecimal()) == 4 * LAYERS + 1
    assert qwen3.matches["rms_norm"] == 4 * LAYERS + 1
    assert found["gelu_and_mul"] == ["\u2013"] * 3
    assert "layers 1-8, layer 1 shown" in page.text_content("[aria-label='The captured graph']")
    assert "layers 1-7, layer 1 shown" in page.text_content("[aria-label='The graph as it runs']")


@pytest.mark.rotating
def test_rewrites_that_cannot_apply_are_folded_away(qwen3, opened):
    page = opened(html_of([qwen3]))
    names = {name for name, numbers in cells(page).items() if set(numbers) == {"\u2013"}}
    assert "gelu_and_mul" in names and "rms_norm" not in names
    assert page.inner_text(".grid .more") == f"{len(names)} rewrites that cannot apply here"
    assert page.is_hidden(".grid tr:has-text('gelu_and_mul')") and page.is_visible(
        ".grid tr:has(a:text-is('rms_norm'))"
    )
    page.focus(".grid .more")
    page.keyboard.press("Enter")
    assert page.is_visible(".grid tr:has-text('gelu_and_mul')")
    assert page.get_attribute(".grid .more", "aria-expanded") == "true"


def test_a_cell_says_why_by_click_and_by_keyboard(qwen3, opened):
    page = opened(html_of([qwen3]))
    page.click(".grid .more")
    page.click(".grid tr:has-text('gelu_and_mul') .cell >> nth=0")
    assert "the graph has no gelu" in page.inner_text(".reason")
    page.click(".grid tr:has(a:text-is('add_rms_norm')) .cell >> nth=1")
    assert "fired" in page.inner_text(".reason") and "modeling_qwen3.py:" in page.inner_text(
        ".reason"
    )
    before = page.inner_text(".reason")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.inner_text(".reason") != before
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    assert page.evaluate("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1


@pytest.mark.rotating
def test_the_slider_changes_the_numbers_to_those_of_the_formulas(qwen3, opened):
    page = opened(html_of([qwen3]))
    whole = sum_of(qwen3, "bytes", T=1)
    assert page.inner_text("[data-total=bytes]") == spelled(whole)
    for power in (5, 13):
        choose(page, "[data-size=T]", power)
        assert page.inner_text("output") == str(2**power)
        assert page.inner_text("[data-total=bytes]") == spelled(sum_of(qwen3, "bytes", T=2**power))
        assert page.inner_text("[data-total=flops]") == spelled(
            sum_of(qwen3, "flops", T=2**power), flops=True
        )
    page.select_option("select[name=machine]", label="NVIDIA H200")
    assert re.match(r"[\d.]+\s(\u00b5s|ms)", page.inner_text("[data-total=time]"))
    shares = [
        float(text.inner_text().rstrip("\u00a0%")) for text in page.query_selector_all(".percent")
    ]
    assert shares == sorted(shares, reverse=True) and abs(sum(shares) - 100) < 1


def sum_of(report, what, **sizes):
    return sum(formula.evaluated(formula.tree(getattr(cost, what)), sizes) for cost in report.costs)


def spelled(number, flops=False):
    units = ["", "k", "M", "G", "T", "P"] if flops else ["B", "kB", "MB", "GB", "TB"]
    while number >= 1000:
        number, units = number / 1000, units[1:]
    return (
        (f"{number:.0f}" if number >= 100 else f"{number:#.3g}".rstrip(".")) + "\u00a0" + units[0]
    )


def test_the_diff_of_a_pass_shows_what_went_and_what_came(qwen3, opened):
    page = opened(html_of([qwen3]))
    step = page.query_selector("details.pass:has(summary b:text-is('add_rms_norm'))")
    step.query_selector("summary").click()

    def marked(kind, side):
        found = step.query_selector_all(f"tr.{kind} td:{side}, tr.replaced td:{side}")
        return " ".join(cell.inner_text() for cell in found)

    gone, made = marked("gone", "first-child"), marked("made", "last-child")
    assert "atom.rms_norm(" in gone and "aten.add(" in gone
    assert "atom.add_rms_norm(" in made and "atom.rms_norm(" not in made.replace(
        "atom.add_rms_norm(", ""
    )
    assert (
        "8 times like this, in layers" in step.inner_text()
        or "9 times like this, in layers" in step.inner_text()
    )


@pytest.mark.rotating
def test_a_kernel_leads_back_to_the_lines_of_the_program(qwen3, opened):
    page = opened(html_of([qwen3]))
    row = page.query_selector(".ops tr[data-op]:has(code:text-is('add_rms_norm'))")
    button = row.query_selector(".more")
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    text = page.inner_text(f"#{button.get_attribute('aria-controls')}")
    assert "aten.rsqrt(" in text and "modeling_qwen3.py:" in text and "model.layers." in text


def test_weights_in_few_bits_are_listed_with_what_they_save(fp8_llama, opened):
    page = opened(html_of([fp8_llama]))
    text = page.inner_text("section:has(h3:text-is('Quantized weights'))")
    assert "scaled_linear_fp8" in text and "fp8, one scale" in text
    wide = sum(found.full_bytes for found in fp8_llama.few_bits)
    assert sum(found.bytes for found in fp8_llama.few_bits) < 0.6 * wide
    assert len(fp8_llama.few_bits) == 2 * 4  # qkv, o, gate and up, down


# ---- hostile and odd reports


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&{{ 7 * 7 }}'


def hostile():
    return Report(
        HOSTILE,
        treated=True,
        matches=Counter({HOSTILE: 1}),
        known=[HOSTILE],
        about={HOSTILE: HOSTILE},
        notes=[HOSTILE],
        sites=[Site(HOSTILE, f"layers.0.{HOSTILE}", 0, HOSTILE, {HOSTILE: HOSTILE})],
        cached=CacheOutcome("miss", HOSTILE),
        near=[Miss("other", "", HOSTILE, 0, HOSTILE, 0.5, "op", HOSTILE, HOSTILE)],
        kernels=[KernelChoice(HOSTILE, HOSTILE, "any", HOSTILE, [(HOSTILE, HOSTILE)], "n")],
        costs=[OpCost(HOSTILE, HOSTILE, 0, HOSTILE, "2*T", "alert(3)", ["n"], ["n"])],
        machine={"name": HOSTILE, "arch": HOSTILE},
        savings=[FusionOpportunity("neighbours", HOSTILE, HOSTILE, 0, HOSTILE, "4*T")],
        phases={HOSTILE: 1.0},
        stages=[
            Stage(
                HOSTILE,
                1,
                f"n = {HOSTILE}  # f32[2]  {HOSTILE}  {HOSTILE}",
                f"m = {HOSTILE}  # f32[2]  -  -",
            )
        ],
        cuda_graphs=[{HOSTILE: 1, "bytes": 5}],
        state=[HOSTILE],
        recompile=HOSTILE,
    )


def test_hostile_names_are_only_shown(opened):
    page = opened(html_of([hostile()]))
    page.on("dialog", lambda dialog: page.said.append(dialog.message))
    for button in page.query_selector_all("button"):
        button.click()
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.said == []
    assert page.query_selector_all("img") == []
    assert HOSTILE in page.inner_text("h1") and HOSTILE in page.inner_text(".reason")


def test_a_script_that_got_in_would_not_run(opened):
    page = opened(
        html_of([Report("M", treated=True)]).replace(
            "</main>", "<script>document.title = 'x'</script></main>"
        )
    )
    assert page.title() != "x"
    assert any("Content Security Policy" in text for text in page.said)


def test_reports_of_graphs_that_were_not_treated_or_are_empty_are_shown(opened):
    page = opened(html_of([Report("A", why_not="gradients are wanted"), Report("B", treated=True)]))
    assert "gradients are wanted" in page.inner_text("main")
    page.click(".tabs >> text=1: B")
    page.wait_for_selector(
        "#g0", state="hidden"
    )  # which is what the page does when its address has changed
    assert page.is_visible("#g1")
    assert page.said == []
    assert "No graph was compiled" in html_of([])


@pytest.mark.rotating
def test_64_layers_make_a_page_of_less_than_3_mb_even_if_no_two_are_alike(qwen3):
    def lines_of_layer_5(text):
        return [
            line
            for line in text.splitlines()
            if "layers.5." in line.split(" = ")[0] + line.rpartition("  # ")[2]
        ]

    def different(text):
        """Layer 5 of the graph for 64 layers of different widths."""
        return "\n".join(
            re.sub(r"\b(\w+_\d+)\b", rf"\g<1>{i:02}", line)
            .replace("layers.5", f"layers.{i}")
            .replace("64]", f"{64 + i}]")
            for i in range(64)
            for line in lines_of_layer_5(text)
        )

    stages = [
        replace(stage, text=different(stage.text), before=different(stage.before))
        for stage in qwen3.stages
    ]
    costs = [
        replace(
            cost,
            layer=i,
            module_path=cost.module_path.replace("layers.5", f"layers.{i}"),
            flops=f"{i}*T",
        )
        for i in range(64)
        for cost in qwen3.costs
        if cost.layer == 5
    ]
    text = html_of([replace(qwen3, stages=stages, costs=costs)])
    assert text.count("shown</th>") == 0 and text.count('<tr class="block">') > 64
    assert MAX_BYTES / 2 < len(text.encode()) < MAX_BYTES
    assert len(html_of([qwen3]).encode()) < MAX_BYTES / 8  # two of its nine layers are written out


def test_the_start_is_told_in_words_seconds_and_bytes(opened):
    report = Report(
        "M",
        treated=True,
        cached=CacheOutcome("miss", "option rounding changed from 'fp32' to 'hf'"),
        phases={"trace": 0.5, "passes": 1.5},
        cuda_graphs=[{"rows": 1, "bytes": 2_000_000}, {"rows": 8, "bytes": 500_000}],
    )
    page = opened(html_of([report]))
    text = page.inner_text("#g0-start")
    assert "Miss, compiled again: option rounding changed from 'fp32' to 'hf'." in text
    assert "2 graphs, 2.5 MB in total" in text and "rows 8" in text and "2.000" in text
    widths = page.evaluate(
        "[...document.querySelectorAll('.phases .bar')].map(bar => bar.style.width)"
    )
    assert widths[:2] == ["33.3333%", "100%"]


def test_a_link_to_a_rewrite_opens_what_it_does(qwen3, opened):
    page = opened(html_of([qwen3]))
    page.click(".grid a:text-is('add_rms_norm')")
    assert page.is_visible("#g0-about-add_rms_norm pre")
    assert "Fold a residual add into the norm" in page.inner_text("#g0-about-add_rms_norm")


@pytest.mark.rotating
def test_every_link_leads_to_a_part_of_the_page_and_summaries_are_sentences(qwen3):
    text = html_of([qwen3])
    ids = set(re.findall(r' id="([^"]+)"', text))
    links = set(re.findall(r' href="#([^"]+)"', text))
    assert links and links <= ids
    summary = re.search(r'id="g0-about-rms_norm_pair"><summary>.*?<span[^>]*>(.*?)</span>', text)[1]
    assert summary.endswith("values (DeepSeek), with their quantizers.")


# ---- what it is made of


BEFORE = """x = input  # f32[4]  -  -
mul = aten.mul(x, 2.0)  # f32[4]  layers.0.mlp  m.py:1
add = aten.add(mul, x)  # f32[4]  layers.0  m.py:2
mul_1 = aten.mul(add, 2.0)  # f32[4]  layers.1.mlp  m.py:1
add_1 = aten.add(mul_1, add)  # f32[4]  layers.1  m.py:2
return [add_1]"""
AFTER = """x = input  # f32[4]  -  -
double = atom.double(x)  # f32[4]  layers.0.mlp  m.py:1
add = aten.add(double, x)  # f32[4]  layers.0  m.py:2
double_1 = atom.double(add)  # f32[4]  layers.1.mlp  m.py:1
add_1 = aten.add(double_1, add)  # f32[4]  layers.1  m.py:2
return [add_1]"""
# The first layer reads what the second one reads.
ALIKE = (
    BEFORE.replace("x = input", "add_9 = input").replace("(x", "(add_9").replace(", x)", ", add_9)")
)


def test_nodes_stand_beside_what_became_of_them():
    rows = [
        (row.kind, row.left and row.left.name, row.right and row.right.name)
        for row in align(parse(BEFORE), parse(AFTER))
    ]
    assert rows == [
        ("same", "x", "x"),
        ("replaced", "mul", "double"),
        ("changed", "add", "add"),
        ("replaced", "mul_1", "double_1"),
        ("changed", "add_1", "add_1"),
        ("same", "return", "return"),
    ]


def test_a_node_that_moved_is_shown_where_it_was_and_where_it_is():
    kinds = Counter(
        row.kind
        for row in align(parse("a = f()\nb = g()\nc = h()"), parse("c = h()\na = f()\nb = g()"))
    )
    assert kinds == {"same": 2, "gone": 1, "made": 1}


def test_what_changes_alike_in_two_layers_is_one_hunk():
    (hunk, other) = hunks(parse(BEFORE), parse(AFTER))
    assert (hunk.count, other.count) == (
        1,
        1,
    )  # the first layer reads the input, the second the first
    (hunk,) = hunks(parse(ALIKE), parse(ALIKE.replace("aten.mul(", "atom.double(")))
    assert (hunk.count, hunk.layers) == (2, {0, 1})


def test_layers_that_look_alike_are_listed_once():
    blocks = fold_layers(parse(ALIKE))
    assert [(block.layers, len(block.lines)) for block in blocks] == [([], 1), ([0, 1], 2), ([], 1)]


@pytest.mark.parametrize(
    "text, sizes, expected",
    [
        ("2*T*(C - T/(2*S) + 1/2)", {"T": 4, "C": 10, "S": 2}, 76.0),
        ("Min(C, 5) + Max(T, 1)**2", {"C": 9, "T": 3}, 14.0),
        ("(T + 7)//8", {"T": 9}, 2.0),
        ("floor(T/8) - ceiling(T/8) + Mod(T, 8)", {"T": 9}, 0.0),
        ("-3*s0", {"s0": 2}, -6.0),
    ],
)
def test_formulas_are_parsed(text, sizes, expected):
    assert formula.evaluated(formula.tree(text), sizes) == expected
    assert formula.names_in(formula.tree(text)) == set(sizes)


@pytest.mark.parametrize(
    "text", ["__import__('os').system('true')", "T.real", "[T]", "T if T else 1", "", "f(T)", "'T'"]
)
def test_nothing_but_formulas_is_taken(text):
    assert formula.tree(text) is None


# ---- what is left on the table


def test_bytes_that_could_be_saved_are_those_of_what_passes_between_kernels():
    from atomc import ops

    def two_norms(x, w):
        return ops.layer_norm(ops.rms_norm(x, w, 1e-6), w, w, 1e-6)

    report = atomc.explain(
        two_norms, torch.randn(8, 32), torch.randn(32), options={"glue": "inductor"}
    )
    (saving,) = report.savings
    assert (saving.kind, saving.what) == ("neighbours", "rms_norm > layer_norm")
    assert saving.bytes == str(
        4 * (2 * 8 * 32 + 32)
    )  # between them written and read, and the weight read twice


def test_a_near_miss_says_what_it_costs():
    def scaled_before_the_norm(x, residual, w):
        total = x + residual
        return F.layer_norm(total * 2.0, (32,), w, w), total

    report = atomc.explain(
        scaled_before_the_norm,
        *torch.randn(2, 8, 32),
        torch.randn(32),
        options={"glue": "inductor"},
    )
    (saving,) = [saving for saving in report.savings if saving.kind == "near miss"]
    assert saving.what == "add_layer_norm" and saving.source.startswith("test_html_report.py:")
    assert saving.bytes == str(
        2 * 4 * 8 * 32
    )  # the sum times two, written by one kernel and read by the other


# ---- files


def test_the_option_writes_one_page_with_every_graph(tmp_path):
    path = tmp_path / "out.html"
    compiled = torch.compile(
        lambda x: F.silu(x) * x, backend="atom", options={"report": str(path), "glue": "eager"}
    )
    compiled(torch.randn(3))
    first = path.read_text()
    compiled(torch.randn(4, 4))
    assert first.count("<article") == 1 and path.read_text().count("<article") == 2
    assert [found.name for found in tmp_path.iterdir()] == ["out.html"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666 & ~umask()
    assert "silu" in first and "were not kept" not in first


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_page_that_cannot_be_written_is_told_once_and_breaks_nothing(tmp_path, caplog):
    options = {"report": str(tmp_path / "no" / "out.html"), "glue": "eager"}
    compiled = torch.compile(lambda x: F.silu(x) + 1, backend="atom", options=options)
    for shape in ((3,), (4, 4), (2, 2, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), F.silu(x) + 1)
    assert sum("could not write its report" in record.message for record in caplog.records) == 1


def test_the_environment_asks_for_a_page_too(monkeypatch):
    monkeypatch.setenv("ATOMC_REPORT", "there.html")
    assert atomc.Options.of().report == "there.html"


def test_an_empty_name_is_refused():
    with pytest.raises(ValueError, match="option report='': expected the name of a file"):
        atomc.Options.of({"report": ""})


def test_the_command_writes_the_page(tmp_path, capsys):
    path = tmp_path / "out.html"
    assert main(["explain", "--layers", "2", "--html", str(path)]) == 0
    assert re.search(
        r"<code>\d+\*T \+ \d+</code>", path.read_text()
    )  # a formula of the number of tokens
    assert capsys.readouterr().out == ""


def test_without_jinja2_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ImportError, match=r"needs the library `jinja2`: pip install 'atomc\[report\]'"
    ):
        Report("M").to_html()


@pytest.mark.rotating
def test_a_process_of_its_own_renders_json():
    data = json.dumps(Report("M", treated=True).to_dict())
    done = subprocess.run(
        [sys.executable, "-m", "atomc.report"], input=data, capture_output=True, text=True
    )
    assert done.stdout == html_of([Report("M", treated=True)]), done.stderr


# ---- two side by side


def two():
    known = ["norm", "rope"]
    first = Report(
        "A",
        treated=True,
        matches=Counter(norm=2, lower=3),
        known=known,
        kernels=[KernelChoice("norm", "", "any", "triton")] * 2,
        costs=[OpCost("norm", "", 0, "", "8*T", "T")],
    )
    second = Report(
        "B",
        treated=True,
        matches=Counter(norm=1),
        known=known,
        absent={"rope": "the graph has no neg"},
        kernels=[KernelChoice("norm", "", "any", "torch")],
        costs=[OpCost("norm", "", 0, "", "16*T", "T")],
        near=[Miss("norm", "", "layers.1", 1, "m.py:3", 0.9, "op", "add", "mul")],
    )
    return first, second


def test_two_reports_side_by_side_say_what_differs_and_why():
    text = Comparison(*two(), ("old", "new")).to_text()
    lines = [re.sub(r"\s+", " ", line) for line in text.splitlines()]
    assert "* norm 2 1" in lines and "* norm triton x2 torch x1" in lines
    assert "* bytes of a decode step 8 B 16 B" in lines
    assert any(
        line.startswith(" norm: norm in layers.1 (m.py:3), 90% there: expected add; found mul")
        for line in lines
    )


def test_a_page_of_two_opens_on_what_differs(opened):
    first, second = two()
    page = opened(html_of([first], [second], ("old", "new")))
    assert "old compared with new" in page.inner_text("h1")
    page.wait_for_selector("#beside", state="visible")
    assert page.is_hidden("#g0")
    assert "differs" in page.inner_text("#beside tr:has(th:text-is('norm'))")
    page.click(".tabs >> text=new: B")
    page.wait_for_selector("#g1", state="visible")
    assert page.said == []


@pytest.mark.parametrize(
    "model, other, names",
    [
        (None, "some/demo", ("the demo model", "demo")),
        (None, "demo", ("the demo model", "demo")),
        ("one/model", "two/model", ("one/model", "two/model")),
        ("org/model", "old.json", ("model", "old.json")),
        ("/", ".", ("/", os.path.basename(os.getcwd()))),
    ],
)
def test_each_side_of_a_comparison_has_a_name(model, other, names):
    assert _names(argparse.Namespace(model=model, beside=other)) == names


@pytest.mark.rotating
def test_the_command_compares_with_what_another_version_wrote(tmp_path, capsys):
    assert main(["explain", "--layers", "2", "--json"]) == 0
    saved = tmp_path / "old.json"
    saved.write_text(capsys.readouterr().out)
    assert main(["explain", "--layers", "3", "--beside", str(saved)]) == 0
    lines = [re.sub(r"\s+", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert "* layers 3 2" in lines and "* add_rms_norm 6 4" in lines
    saved.write_text("{}")
    assert main(["explain", "--beside", str(saved)]) == 2
    saved.write_text('[{"version": 0}]')
    assert main(["explain", "--beside", str(saved)]) == 2
    assert "expected the output of `atomc explain --json`" in capsys.readouterr().err


def test_a_report_is_read_back_from_its_json(qwen3):
    again = Report.of(json.loads(qwen3.to_json()))
    assert again.why("add_rms_norm") == qwen3.why("add_rms_norm")
    assert again.num_layers == LAYERS and json.loads(again.to_json()) == json.loads(qwen3.to_json())
