"""The README is short, cites the latest release, and names the command that tests it."""

import re

import yaml
from support.documentation_pages import ROOT, find_code_blocks, read_page

import fedjax_het

README = ROOT / "README.md"
TEST_COMMAND = 'pip install -e ".[test]" && pytest'


def test_readme_is_short():
    assert len(read_page(README).splitlines()) <= 120


def test_readme_pictures_are_small():
    pictures = re.findall(r"!\[[^\]]{40,}\]\(([^)#]+)#gh-(\w+)-mode-only\)", read_page(README))
    assert [mode for _, mode in pictures] == ["light", "dark"]
    assert all((ROOT / picture).stat().st_size < 80_000 for picture, _ in pictures)


def read_versions():
    return re.findall(r"^## (\S+)", read_page(ROOT / "CHANGELOG.md"), flags=re.MULTILINE)


def test_citations_name_the_latest_release():
    ((_, entry),) = find_code_blocks("bibtex", [README])
    released = next(version for version in read_versions() if ".dev" not in version)
    assert f"version = {{{released}}}" in entry
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == released
    assert f"title = {{{cited['title']}}}" in entry


def test_changelog_names_this_version_first():
    versions = read_versions()
    assert versions[0] == fedjax_het.__version__
    assert versions == sorted(versions, reverse=True) and len(set(versions)) == len(versions)


def test_ci_runs_readme_test_command():
    lines = [line for _, block in find_code_blocks("bash", [README]) for line in block.splitlines()]
    assert TEST_COMMAND in lines
    steps = (ROOT / ".ci" / "run").read_text().strip().splitlines()
    assert steps[-1] == TEST_COMMAND
    assert any(step.startswith("mkdocs build --strict") for step in steps)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_readme_numbers_match_pages():
    rows = re.findall(r"^\| (\w+) \([^|]*\) \|(.*\d.*)\|$", read_page(README), re.M)
    assert [paper for paper, _ in rows] == ["DynaFed", "FedAF", "FedAMP", "FSL"]
    for paper, cells in rows:
        page = read_page(ROOT / "experiments" / paper.lower() / "RESULTS.md")
        on_page = {f"{float(number):.1f}" for number in re.findall(r"\d+\.\d+", page)}
        *_, measured, reported = cells.split("|")
        numbers = re.findall(r"\d+\.\d", measured + reported)
        assert len(numbers) == 4 and set(numbers) <= on_page, paper


def test_readme_speed_matches_page():
    speed = read_page(ROOT / "experiments" / "SPEED.md")
    peers, _, compiled = speed.partition("## Compiled PyTorch")
    rows = re.findall(r"^\| R[123]: (.*?) \|(.*)", peers, re.M)
    columns = [[cell.strip("× ") for cell in cells.split("|")] for _, cells in rows]
    loop, fedjax, flower = ([float(row[i]) for row in columns if row[i]] for i in (1, 2, 4))
    text = " ".join(read_page(README).split())
    assert f"{min(loop)} to {max(loop)} times as fast as a PyTorch loop" in text
    assert f"{min(fedjax)} to {max(fedjax)} times as fast as FedJAX" in text
    assert f"{min(flower):g} to {max(flower):g} times as fast as Flower" in text
    best = [float(value) for value in re.findall(r"^\| R[123]: .*\*\*(.*?)\*\*", compiled, re.M)]
    assert len(best) == 3
    expected = f"{min(best)} to {max(best)} times as fast as the best form of compiled PyTorch"
    assert expected in text and expected in " ".join(speed.split())
