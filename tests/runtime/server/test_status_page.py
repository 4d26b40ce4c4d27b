"""The status page in a browser: live values, no external requests, light and dark, large and small
screens.
"""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from serving import serving

from atomc.runtime.server.app import OPEN_PATHS
from atomc.runtime.server.status import (
    PAGE,
    compile_summary,
    content_policy,
    tokens_per_second_history,
    ttft_summary,
)

pytestmark = pytest.mark.xdist_group("status page")
KEY = "a-key"


@pytest.fixture(scope="module")
def server():
    with serving("--api-key", KEY) as found:
        yield found


@pytest.fixture
def page(browser, server):
    """An empty page. page.said has its console messages, page.asked its requests."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.said, page.asked = [], []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    context.close()


def until(page, seen, seconds=60):
    """Waits until the condition holds. The page's own policy forbids what wait_for_function
    does.
    """
    for _ in range(20 * seconds):
        if seen():
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not in {seconds} s: {page.inner_text('main')}")


def says(page, name, text):
    until(page, lambda: page.text_content(f"#{name}") == text)


def opened(page, server, key=KEY):
    """The page of a serving server, opened with the key."""
    page.add_init_script(f"sessionStorage.setItem('atomc-key', {json.dumps(key)})")
    page.goto(server.url)
    says(page, "state", "serving")
    return page


def request(server, path, body=None):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, data, headers), timeout=120
    ) as response:
        return response.read()


def generate(server, tokens):
    return request(
        server,
        "/v1/completions",
        {
            "model": "atomc-demo",
            "prompt": "She looked at him and said " * 20,
            "max_tokens": tokens,
            "ignore_eos": True,
        },
    )


def number(page, name):
    return float(
        page.text_content(f"#{name}").replace(",", "").replace("\u2013", "nan").rstrip("%")
    )


@pytest.mark.rotating
def test_figures_change_while_requests_run(page, server):
    opened(page, server)
    says(page, "speed", "0")
    assert number(page, "running") == 0
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(generate, server, 400) for _ in range(4)]
        until(
            page,
            lambda: (
                number(page, "running") >= 1
                and number(page, "speed") > 0
                and number(page, "kv") > 0
            ),
        )
        until(page, lambda: page.get_attribute("#line", "d").startswith("M"))
        for answer in answers:
            answer.result()
    says(page, "running", "0")
    made = int(page.text_content("#engine tr:first-child td.num").replace(",", ""))
    assert made >= 1600
    assert page.said == []


@pytest.mark.rotating
def test_the_cache_counts_tokens_beside_blocks(page, server):
    opened(page, server)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server, 600)
        until(
            page,
            lambda: re.fullmatch(
                r"[1-9]\d* of 8,192 blocks in use", page.text_content("#kv-blocks")
            ),
        )
        until(
            page,
            lambda: re.fullmatch(r"[1-9]\d* of 131,072 tokens", page.text_content("#kv-tokens")),
        )
        answer.result()


def test_times_to_the_first_token_errors_and_uptime_are_shown(page, server):
    generate(server, 2)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        request(server, "/v1/models/nobody")
    opened(page, server)
    until(page, lambda: page.text_content("#first").endswith(" ms"))
    assert "with status 404" in page.text_content("#errors-more") and number(page, "errors") >= 1
    assert page.text_content("#uptime").endswith(" s") and page.text_content(
        "#uptime-more"
    ).startswith("since ")


@pytest.mark.rotating
def test_outdated_values_are_dimmed_and_dated(page):
    def dimmed(card):
        return (
            float(page.evaluate(f"getComputedStyle(document.querySelector('{card}')).opacity")) < 1
        )

    engine, front = "section[aria-labelledby=h-running]", "section[aria-labelledby=h-errors]"
    with serving("--api-key", KEY, "--restart-engine", 1, "--max-num-seqs", 8) as server:
        opened(page, server)
        assert page.is_hidden("#stale") and not dimmed(engine)
        os.kill(server.engine_pid, signal.SIGKILL)
        says(page, "state", "not serving")
        assert (
            "(attempt 1 of 1): the engine's process was killed by signal 9. The engine's "
            "values are from" in (page.text_content("#stale"))
        )
        assert dimmed(engine) and not dimmed(front)

        says(page, "state", "serving")
        assert page.is_hidden("#stale") and not dimmed(engine)
        assert page.text_content("#uptime-more").endswith("engine restarted once")

        server.process.send_signal(signal.SIGTERM)
        says(page, "state", "no response from the server")
        assert page.text_content("#stale").startswith(
            "no response from the server. All values are from"
        )
        assert dimmed(engine) and dimmed(front)


@pytest.mark.rotating
def test_a_page_that_is_opened_later_shows_what_was_generated_before(page, server):
    generate(server, 200)
    until(page, lambda: sum(json.loads(request(server, "/status"))["speeds"]) >= 200)
    opened(page, server)
    until(page, lambda: page.text_content("#peak").startswith("highest "))
    assert float(page.text_content("#peak").split()[1].replace(",", "")) > 0
    assert page.said == []


@pytest.mark.rotating
def test_nothing_is_asked_of_another_host_and_nothing_is_wrong(page, server):
    opened(page, server)
    until(page, lambda: sum(url.endswith("/status") for url in page.asked) >= 3)
    assert page.said == []
    assert {re.sub(r"^(https?://[^/]+|data:).*", r"\1", url) for url in page.asked} <= {
        server.url,
        "data:",
    }


@pytest.mark.rotating
def test_what_the_compiler_did_is_shown_with_a_link_to_all_of_it(page, server):
    opened(page, server)
    page.wait_for_selector("#rewrites tr")
    report = json.loads(request(server, "/compiler"))
    shown = dict(row.split("\t") for row in page.inner_text("#rewrites").splitlines())
    assert shown and all(int(sites) == report["matches"][name] for name, sites in shown.items())
    assert "total" in page.inner_text("#phases")
    assert page.get_attribute("a:has-text('as JSON')", "href") == "compiler"


@pytest.mark.rotating
def test_the_whole_report_is_a_page_that_is_saved_with_the_key(page, server):
    opened(page, server)
    with page.expect_download(timeout=120_000) as saved:
        page.click("a:text-is('Full report')")
    text = Path(saved.value.path()).read_text()
    assert (
        saved.value.suggested_filename == "atomc-report.html"
        and "Kernels and what they cost" in text
    )
    assert request(server, "/compiler/report").decode() == text
    assert page.said == []


@pytest.mark.rotating
@pytest.mark.parametrize("path", ["/compiler", "/v1/models"])
def test_a_link_to_json_is_followed_with_the_key(page, server, path):
    opened(page, server)
    with page.expect_download(timeout=120_000) as saved:
        page.click(f"a[href='{path[1:]}']")
    assert saved.value.suggested_filename.endswith(".json")
    assert json.loads(Path(saved.value.path()).read_text()) == json.loads(request(server, path))


def test_only_links_to_open_pages_are_followed_without_the_key():
    links = re.findall(r'<a href="([^"]+)"( data-file)?', PAGE.read_text())
    assert {f"/{path}" for path, with_key in links if not with_key} <= OPEN_PATHS
    assert ("compiler", " data-file") in links and ("v1/models", " data-file") in links


@pytest.mark.rotating
def test_without_the_key_the_page_asks_for_it(page, server):
    page.goto(server.url)
    page.wait_for_selector("#login:not([hidden])")
    assert page.text_content("#state") == "locked"
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    says(page, "state", "serving")
    assert page.is_hidden("#login")


@pytest.mark.rotating
def test_it_is_used_by_keyboard(page, server):
    opened(page, server)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "pause"
    page.keyboard.press("Enter")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    polls = len(page.asked)
    page.wait_for_timeout(1500)
    assert len(page.asked) == polls
    page.keyboard.press("Enter")
    says(page, "state", "serving")


@pytest.mark.rotating
@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_it_fits_its_width(page, server, width):
    page.set_viewport_size({"width": width, "height": 800})
    opened(page, server)
    page.wait_for_selector("#kernels tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


CONTRAST = """() => {
  const seen = [], light = color => {
    const part = value => (value /= 255) <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return .2126 * part(r) + .7152 * part(g) + .0722 * part(b);
  };
  for (const element of document.querySelectorAll("h1,h2,p,td,th,caption,a,button,.badge,.unit")) {
    if (!element.textContent.trim() || !element.checkVisibility()) continue;
    let behind = element;
    while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const both = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
    seen.push((Math.max(...both) + .05) / (Math.min(...both) + .05));
  }
  return [seen.length, Math.min(...seen)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(page, server, scheme):
    page.emulate_media(color_scheme=scheme)
    opened(page, server)
    page.wait_for_selector("#kernels tr")
    texts, least = page.evaluate(CONTRAST)
    assert texts > 20
    assert least >= 4.5  # WCAG AA
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 128) == (scheme == "dark")


def test_the_page_is_open_and_its_figures_need_the_key(server):
    with urllib.request.urlopen(server.url, timeout=60) as response:
        assert response.headers["Content-Security-Policy"] == content_policy(
            response.read().decode()
        )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/status", timeout=60)
    status = json.loads(request(server, "/status"))
    assert (status["model"], status["sick"]) == ("atomc-demo", None)
    assert status["stats"]["kv_blocks_total"] > 0
    assert sum(kernel["nodes"] for kernel in status["compiler"]["kernels"]) > 0


def test_the_policy_allows_this_page_only():
    page = PAGE.read_text()
    policy = content_policy(page)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert content_policy(page.replace("tick();", "evil();")) != policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert " style=" not in page and "onclick" not in page


def test_speeds_of_past_seconds_add_up_to_what_was_generated():
    assert tokens_per_second_history([], 10.0) == []
    assert tokens_per_second_history([(10.0, 5)], 10.5) == [0.0]
    assert tokens_per_second_history([(0.0, 100), (2.0, 140), (4.0, 140)], 4.0) == [
        20.0,
        20.0,
        0.0,
        0.0,
    ]
    assert tokens_per_second_history([(0.5, 0), (0.9, 8), (1.3, 8), (3.1, 44)], 4.2) == [
        8.0,
        18.0,
        18.0,
        0.0,
    ]


def test_first_tokens_are_those_of_the_last_requests():
    assert ttft_summary([]) is None
    assert ttft_summary([0.5]) == {"requests": 1, "median": 0.5, "p95": 0.5}
    assert ttft_summary([i / 100 for i in range(101)]) == {
        "requests": 101,
        "median": 0.5,
        "p95": 0.95,
    }


def test_a_report_is_summed_up():
    report = {
        "treated": True,
        "why_not": "",
        "near": [1],
        "notes": ["n"],
        "phases": {"trace": 1.0, "passes": 0.5},
        "matches": {"rms_norm": 4, "rope": 0, "lower": 9},
        "sites": [{"layer": 0}, {"layer": 1}, {"layer": 1}, {"layer": None}],
        "kernels": [{"op": "rms_norm", "chosen": "triton"}] * 2
        + [{"op": "linear", "chosen": "torch"}],
    }
    found = compile_summary(report)
    assert found["rewrites"] == {"rms_norm": 4}
    assert found["kernels"] == [
        {"op": "rms_norm", "runs_as": "triton", "nodes": 2},
        {"op": "linear", "runs_as": "torch", "nodes": 1},
    ]
    assert (found["layers"], found["seconds"]) == (2, 1.5)
    assert Path(PAGE).is_file()
