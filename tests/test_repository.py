"""What a code host reads of the repository: workflows, hooks, the site's build, the citation."""

import re
import tomllib

import yaml

from tests.pages.blocks import PAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r":: (3\.\d+)'", str(PROJECT["classifiers"]))
CI = (ROOT / ".ci/run").read_text()


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_workflows_run_what_a_contributor_runs_on_the_pythons_of_the_package():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f"for version in {' '.join(PYTHONS)}; do" in CI
    pythons = [read(".readthedocs.yaml")["build"]["tools"]["python"]]
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = read(path)
        assert (workflow["permissions"], "concurrency" in workflow) == ({"contents": "read"}, True)
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        uses = [step["uses"] for step in steps if "uses" in step]
        assert all(re.search(r"@v\d+\.\d+\.\d+$", each) for each in uses), uses
        pythons += [step["with"].get("python-version") for step in steps if "with" in step]
    assert {*" ".join(filter(None, pythons)).split()} == {PYTHONS[0], PYTHONS[-1]}
    assert {"run": ".ci/run"} in read(".github/workflows/ci.yml")["jobs"]["run"]["steps"]


def test_the_hooks_are_the_commands_of_ci():
    hooks = [hook["entry"] for hook in read(".pre-commit-config.yaml")["repos"][0]["hooks"]]
    linted = re.findall(r'^"\$work/first/bin/((?:ruff|mypy).*?)"(.*)$', CI, re.MULTILINE)
    assert hooks == ["".join(each).replace(" --check", "") for each in linted]


def test_the_citation_is_of_this_version_its_addresses_and_papers():
    citation, papers = read("CITATION.cff"), (ROOT / "docs/papers.md").read_text()
    told = [citation[key] for key in ("version", "repository-code", "url")]
    assert told == [PROJECT["version"], *PROJECT["urls"].values()]
    installed = re.findall(r"git\+([^\s\"'`]+)", "".join(path.read_text() for path in PAGES))
    assert {*installed} == {PROJECT["urls"]["Repository"]}
    cited = [each["identifiers"][0]["value"] for each in citation["references"]]
    assert cited == re.findall(r"arXiv:\d{4}\.\d{5}", papers)
