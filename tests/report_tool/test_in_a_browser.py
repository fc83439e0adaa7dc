"""The page in a real browser, from a file: it draws, sorts, filters and zooms, says nothing on the console and asks for
nothing from elsewhere. Skipped where there is no Chromium with its driver."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt

from .conftest import Measured, tool

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")]
LONGEST_S = 120


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_script_timeout(LONGEST_S)
    yield driver
    driver.quit()


def opened(browser: Any, page: Path) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what other pages left
    browser.get(page.as_uri())
    ready = "return document.documentElement.dataset.ready === 'yes'"
    WebDriverWait(browser, LONGEST_S).until(lambda driver: driver.execute_script(ready))
    return browser


def asked_for(browser: Any) -> list[str]:
    """The addresses that were requested, besides the page and what is within it."""
    messages = [json.loads(each["message"])["message"] for each in browser.get_log("performance")]
    addresses = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return [each for each in addresses if not each.startswith(("file:", "data:", "blob:"))]


@pytest.fixture(scope="module")
def page(measured: Measured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    flags = [f"--benchmark={measured.whole}", f"--benchmark={measured.per_op}", f"--energy={measured.energy}"]
    flags.append(f"--replayed={measured.trace}")
    assert tool("report", *flags, f"--baseline={measured.earlier}", "-o", out, measured.capture) == 0
    return out


@pytest.mark.guarantee("report-page")
def test_every_picture_is_drawn_and_nothing_is_said_or_asked_for(browser: Any, page: Path) -> None:
    opened(browser, page)
    pictures = browser.execute_script("return document.querySelectorAll('.picture').length")
    drawn = browser.execute_script("return document.querySelectorAll('.picture .main-svg:first-child').length")
    assert pictures == drawn == 13
    assert browser.execute_script("return document.querySelectorAll('.picture .bars path').length") > 50
    assert browser.get_log("browser") == [] and asked_for(browser) == []


def cells(browser: Any, table: str, place: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(r => r.cells[arguments[1]].innerText)"
    )
    found: list[str] = browser.execute_script(script, table, place)
    return found


def test_a_table_sorts_by_figures_and_filters(browser: Any, page: Path) -> None:
    opened(browser, page)
    heads = browser.find_elements("css selector", "#call-sites thead th")
    place = [each.text for each in heads].index("calls")
    seen = []
    for _ in range(2):
        browser.execute_script("arguments[0].click()", heads[place])
        seen.append([int(text) for text in cells(browser, "call-sites", place)])
    assert sorted(seen[0]) == seen[0] or sorted(seen[1]) == seen[1]
    assert sorted(seen[0], reverse=True) == seen[0] or sorted(seen[1], reverse=True) == seen[1]
    assert seen[0] != seen[1] and {len(each) for each in seen} == {10}
    search = browser.find_element("css selector", "#call-sites input[type=search]")
    search.send_keys("aten::mm")
    assert all("aten::mm" in text for text in cells(browser, "call-sites", 1))
    search.send_keys("no such thing")
    assert browser.find_elements("css selector", "#call-sites td.dt-empty")


def test_a_kernel_leads_to_the_row_of_its_dearest_call_site(browser: Any, page: Path) -> None:
    opened(browser, page)
    link = browser.find_element("xpath", "//div[@id='kernels']//a[starts-with(., 'aten::mm')]")
    name = link.get_attribute("href").partition("#")[2]
    browser.execute_script("arguments[0].click()", link)
    (row,) = browser.find_elements("css selector", "tr.found")
    assert row.get_attribute("id") == name and "aten::mm" in row.text


def bars_of_ops(browser: Any) -> list[str]:
    script = (
        "return document.getElementById('picture-timeline').data"
        ".filter(each => each.name !== 'scopes').flatMap(each => each.hovertext)"
    )
    found: list[str] = browser.execute_script(script)
    return found


def test_zooming_into_the_timeline_tells_apart_what_shared_a_bar(browser: Any, page: Path) -> None:
    opened(browser, page)
    before = bars_of_ops(browser)
    # Seen from so far away that everything is within three pixels, all ops of the lane share a bar.
    far = "document.getElementById('picture-timeline').emit('plotly_relayout', {'xaxis.range': [0, 1e6]})"
    browser.execute_script(far)
    (together,) = bars_of_ops(browser)
    told = browser.find_element("css selector", "#timeline .told")
    ops = int(together.partition("<b>")[2].partition(" ")[0])
    assert ops > 40 and f"up to {ops} ops" in told.text
    # Around the shortest op no two of them are within three pixels.
    shortest = """
        const bars = window.reportFigures.timeline.timeline.bars, span = Math.min(...bars.span);
        let start = 0;
        for (let i = 0; i <= bars.span.indexOf(span); i++) start += bars.start[i];
        return [start, span]"""
    start, span = browser.execute_script(shortest)
    assert span > 0
    near = "Plotly.relayout('picture-timeline', {'xaxis.range': [arguments[0], arguments[1]]}).then(arguments[2])"
    browser.execute_async_script(near, (start - span) / 1e9, (start + 2 * span) / 1e9)
    apart = bars_of_ops(browser)
    assert 0 < len(apart) < 10 and not any(" ops</b>" in text for text in apart) and "a bar for each" in told.text
    browser.execute_script("document.getElementById('picture-timeline').emit('plotly_doubleclick')")
    assert bars_of_ops(browser) == before


def test_scopes_have_names_and_a_long_time_without_an_op_is_narrow_and_says_so(browser: Any, tmp_path: Path) -> None:
    with replayfmt.capture(tmp_path / "c.opreplay"):
        for each in ("first", "second"):
            with replayfmt.scope(each):
                x = torch.ones(8)
                for _ in range(50):
                    x = x + 1
            time.sleep(1 if each == "first" else 0)
    assert tool("report", "-o", tmp_path / "c.html", tmp_path / "c.opreplay") == 0
    opened(browser, tmp_path / "c.html")
    shown = browser.execute_script(
        """
        const picture = document.getElementById('picture-timeline');
        const texts = [...picture.querySelectorAll('.bartext')].map(each => each.textContent);
        const said = [...picture.querySelectorAll('.annotation-text')].map(each => each.textContent);
        const end = picture.data.flatMap(each => each.base.map((base, i) => base + each.x[i]));
        return [texts, said, Math.max(...end), picture.data.flatMap(each => each.hovertext)]"""
    )
    texts, said, end, hover = shown
    assert {"first", "second"} <= set(texts)
    assert any(text.endswith(" s") and text.startswith("1") for text in said) and end < 0.5
    assert any("from 1." in text for text in hover), "the time itself stays"
    assert browser.get_log("browser") == []


def test_a_bar_of_a_replay_leads_nowhere_and_one_of_a_call_to_its_row(browser: Any, page: Path) -> None:
    opened(browser, page)
    clicked = """
        const data = document.getElementById(arguments[0]).data.filter(each => each.name !== 'scopes');
        return data.flatMap(each => each.hovertext.map((text, i) => [text, each.customdata[i]]))"""
    for name, leads in (("timeline-replayed", False), ("timeline-isolated", True), ("timeline", True)):
        bars = browser.execute_script(clicked, f"picture-{name}")
        single = [(text, site) for text, site in bars if " ops</b>" not in text]
        assert single and all(bool(site) is leads and ("call site" in text) is leads for text, site in single)


@pytest.mark.guarantee("report-page")
def test_what_a_capture_is_named_does_not_run(browser: Any, hostile: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert tool("report", "-o", out, hostile) == 0
    opened(browser, out)
    assert browser.execute_script("return window.harmed ?? null") is None
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert browser.get_log("browser") == [] and asked_for(browser) == []
    # Even markup that found its way into the page would not run.
    browser.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.harmed=1\">')")
    browser.execute_async_script("setTimeout(arguments[0], 200)")
    assert browser.execute_script("return window.harmed ?? null") is None
    assert any("Content Security Policy" in each["message"] for each in browser.get_log("browser"))


@pytest.mark.parametrize(("scheme", "text"), [("light", "rgb(36, 41, 47)"), ("dark", "rgb(214, 217, 220)")])
def test_on_a_phone_nothing_is_wider_than_the_screen_by_day_and_by_night(
    browser: Any, page: Path, scheme: str, text: str
) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        opened(browser, page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert browser.execute_script("return getComputedStyle(document.body).color") == text
        label = "return getComputedStyle(document.querySelector('#picture-top-calls .ytick text')).fill"
        assert browser.execute_script(label) == text
        ends = "return getComputedStyle(document.querySelector('#picture-baseline .xerror')).stroke"
        assert browser.execute_script(ends) == text
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_on_paper_without_backgrounds_the_verification_can_be_read(browser: Any, page: Path) -> None:
    opened(browser, page)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        style = "return getComputedStyle(document.querySelector('.verification strong'))"
        assert browser.execute_script(f"{style}.color") == "rgb(0, 0, 0)"
        assert browser.execute_script(f"{style}.borderTopStyle") == "solid"
        assert browser.execute_script(f"{style}.backgroundColor") == "rgba(0, 0, 0, 0)"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_on_paper_no_picture_is_wider_than_the_page_and_the_screen_has_its_own_again(browser: Any, page: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    opened(browser, page)
    widest = "return Math.max(...[...document.querySelectorAll('.main-svg')].map((each) => each.clientWidth))"
    before = browser.execute_script(widest)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.body.clientWidth") <= 1120
    assert browser.execute_script(widest) <= 1120 < before
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    WebDriverWait(browser, LONGEST_S).until(lambda driver: driver.execute_script(widest) == before)
