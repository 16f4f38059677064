"""The README is short, cites the latest release, and names the command that tests it."""

import re

import yaml
from support.documentation_pages import ROOT, find_code_blocks, read_page

import fedjax_het

README = ROOT / "README.md"
TEST_COMMAND = 'pip install -e ".[test]" && pytest'


def test_readme_is_short():
    assert len(read_page(README).splitlines()) <= 200


def test_readme_pictures_are_small():
    first, second = re.findall(r"!\[[^\]]{40,}\]\(([^)]+)\)", read_page(README))
    assert all((ROOT / picture).stat().st_size < 150_000 for picture in (first, second))


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
    rows = re.findall(
        r"^\| ([^|`]+) \| (\d\S+ \(\S+\)) \| (\S+ \(\S+\)) \|$", read_page(README), re.M
    )
    assert len(rows) == 10
    results = read_page(ROOT / "experiments" / "RESULTS.md")
    for name, *cells in rows:
        for cell in cells:
            measured, reported = re.fullmatch(r"(\S+) \((\S+)\)", cell).groups()
            pairs = re.findall(rf"\| {name.lower()}\b[^|]*\| ([\d.]+)[^|]*\|(.*)\|", results)
            assert any(
                f"{float(mean):.1f}" == measured
                and reported in {f"{float(value):.1f}" for value in re.findall(r"[\d.]+\d", rest)}
                for mean, rest in pairs
            ), (name, cell)
    speed = read_page(ROOT / "experiments" / "SPEED.md")
    rows = re.findall(r"\| ([\d,]+) (\| × [\d.]+ \| × [\d.]+ \|)", read_page(README))
    assert len(rows) == 4 and all(f"| {rate} {times}" in speed for rate, times in rows)
