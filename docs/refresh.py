"""Make what the pages show anew: the output of their commands and the pictures of the report.

    python docs/refresh.py FOLDER

FOLDER is where `inrun demo` and `inrun demo --task text` were run, and the commands of
guide-ask.md: it holds runs/demo-digits, runs/demo-text, runs/docs and answers.html. A block after
`<!-- output of: COMMAND -->` is replaced by what the command prints.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent
MARK = re.compile(r"(<!-- output of: (.+?) -->\n```\n)(.*?)(^```$)", re.S | re.M)
WIDTH = 96


def output(command: str, folder: Path) -> str:
    env = os.environ | {"COLUMNS": str(WIDTH), "TERM": "dumb"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def refresh(page: Path, folder: Path) -> None:
    text = page.read_text("utf-8")
    page.write_text(MARK.sub(lambda m: m[1] + output(m[2], folder) + m[4], text), "utf-8")


SHOTS = {  # name: width, height, dark, section
    "report-light": (1200, 1000, False, None),
    "report-dark": (1200, 1000, True, None),
    "report-suspects-light": (1200, 1000, False, "suspects"),
    "report-suspects-dark": (1200, 1000, True, "suspects"),
    "report-adds-up-light": (1200, 1000, False, "adds-up"),
    "report-groups-dark": (1200, 1000, True, "groups"),
    "report-phone-light": (390, 844, False, "suspects"),
    "report-phone-dark": (390, 844, True, None),
}
ANSWER_SHOTS = {"answers-light": (1100, 1150, False, None)}
TEXT_SHOTS = {"report-tokens-light": (1200, 800, False, "tokens")}  # of the text demo


def pictures(report: Path, shots: dict[str, tuple[int, int, bool, str | None]]) -> None:
    """The report in both themes and on a phone."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument("--force-prefers-reduced-motion")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    try:
        for name, (width, height, dark, section) in shots.items():
            size = {"width": width, "height": height, "deviceScaleFactor": 1}
            size["mobile"] = width < 500
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(report.resolve().as_uri())
            button = browser.find_element("id", "theme")
            if (button.text == "Dark theme") == dark:
                button.click()
            to = "document.getElementById(arguments[0])?.scrollIntoView() ?? scrollTo(0, 0)"
            browser.execute_script(to, section)
            browser.save_screenshot(str(DOCS / "images" / f"{name}.png"))
    finally:
        browser.quit()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for page in sorted((DOCS / "commands").glob("*.md")):
        refresh(page, folder)
    pictures(folder / "runs" / "demo-digits" / "report.html", SHOTS)
    pictures(folder / "runs" / "demo-text" / "report.html", TEXT_SHOTS)
    pictures(folder / "answers.html", ANSWER_SHOTS)
