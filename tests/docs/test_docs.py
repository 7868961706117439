"""Code in README and docs runs as it stands; measured tables are those of the committed results."""

import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
PAGES = [
    "README.md", "docs/optimizers.md", "docs/operations.md", "docs/packed.md",
    "docs/which-number.md",
]  # fmt: skip
NEEDS = {"docs/integrations.md": ("transformers", "trl", "accelerate", "lightning", "datasets")}


@pytest.mark.parametrize("page", PAGES)
def test_code_in_the_docs_runs(page, capsys):
    torch.set_default_dtype(torch.float32)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names = {"__name__": "__docs__"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    if page == "README.md":
        assert len(names["run"].values()) > 300
        assert names["run"].steps()["explained"].dropna().iloc[-1] == pytest.approx(1, abs=0.05)
        assert "value" in capsys.readouterr().out
        names["run"].close()


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("page", NEEDS)
def test_code_of_the_integrations_runs(page, tmp_path, monkeypatch):
    """Each block by itself, as a reader would copy it, on the small data of the first one."""
    for name in NEEDS[page]:
        pytest.importorskip(name, reason=f"{page} uses it")
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(blocks) == 6
    first: dict[str, object] = {"__name__": "__docs__"}
    exec(compile(blocks[0], page, "exec"), first)
    for block in blocks[1:]:
        names = dict(first)
        exec(compile(block, page, "exec"), names)
        assert len(names["table"]) > 0


def test_tables_are_those_of_the_results():
    import tables

    for page in tables.pages():
        text = page.read_text()
        assert tables.rendered(text) == text, f"run python benchmarks/tables.py for {page.name}"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_refuses_what_the_docs_refuse():
    def heads(page, title):
        section = (ROOT / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
        return [h.strip(".:") for h in re.findall(r"^\* \*\*(.*?)\*\*", section, re.MULTILINE)]

    refused = heads("docs/operations.md", "What is refused")
    assert len(refused) > 3
    assert heads("README.md", "What it cannot do") == refused


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_architecture_names_what_exists():
    text = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "src/inrun"
    for name in set(re.findall(r"`([\w/]+(?:\.py|/))`", text)):
        place = (
            ROOT
            if name.startswith(("tests/", "benchmarks/", "docs/", "experiments/", "src/"))
            else package
        )
        assert (place / name).exists(), f"docs/architecture.md names {name}"
    rooms = text[text.index("## Rooms") : text.index("## Who may import whom")]
    for path in package.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            name = path.name if path.suffix else f"{path.name}/"
            assert name.startswith("__") or f"`{name}`" in rooms, (
                f"{name} is not in the table of rooms"
            )


def test_the_version_has_three_numbers():
    import inrun

    assert re.match(r"\d+\.\d+\.\d+", inrun.__version__)
