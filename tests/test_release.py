# SPDX-License-Identifier: Apache-2.0
"""Files of a release: versions and requirements agree; workflows and paper are complete."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_implicit
from pyro_implicit import fit

ROOT = Path(__file__).parents[1]
if not (ROOT / ".github").is_dir():
    pytest.skip("tests of the checkout", allow_module_level=True)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_recipe_has_the_version_and_the_requirements_of_the_package() -> None:
    recipe = read("recipe/meta.yaml")
    assert f'{{% set version = "{pyro_implicit.__version__}" %}}' in recipe
    (required,) = re.findall(r"install_requires=\[(.*?)\]", read("setup.py"))
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # as conda-forge calls them
    wanted = []
    for one in re.findall(r'"(.+?)"', required):
        name, bound = re.fullmatch(r"([\w-]+)(.*)", one).groups()  # type: ignore[union-attr]
        wanted.append(f"{names.get(name, name)} {bound}".strip())
    run = recipe.split("  run:\n")[1].split("\n\n")[0]
    assert set(re.findall(r"- (.+)", run)) == {*wanted, "python >=3.11"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=str)
def test_workflows_run_environments_of_tox(path: Path) -> None:
    tox = configparser.RawConfigParser()
    tox.read_string(read("tox.ini"))
    known = set(re.split(r",\s*", tox["tox"]["env_list"])) | {"lowest", "highest", "numerics"}
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"env: (\w+)", text))
    for environments in re.findall(r"tox -e ([\w,]+)", text):
        named |= set(environments.split(","))
    assert named and named <= known
    assert "permissions:" in text  # tokens of workflows have no more rights than needed


def test_paper_cites_what_it_lists() -> None:
    cited = set(re.findall(r"@(\w+)", read("paper/paper.md")))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", read("paper/paper.bib"), re.MULTILINE))


def test_security_page_shares_results_without_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))

    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", read("SECURITY.md"), re.DOTALL)
    found = {"torch": torch, "result": fit(model, "auto", seed=0)}
    exec(code, found)
    assert found["content"]["draws"]["x"].shape == (4_000,)
    assert found["content"]["policy"]["correction"]["max_khat"] == 0.5
