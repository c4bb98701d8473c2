"""The README says what the code does: its table is the catalogue's, its example runs, its commands exist."""

import re
from pathlib import Path

import jax_ops
from jax_ops.__main__ import COMMANDS
from jax_ops.tools.support import support_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_support_table_is_the_catalogues():
    between = README.split("<!-- support table: python -m jax_ops.tools.support -->\n")[1].split("<!-- end")[0]
    assert between.strip() == support_table()


def test_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    exec(code.group(1), {})
    assert "(40, 8, 64)" in capsys.readouterr().out


def test_every_op_it_lists_exists():
    section = README.split("## The ops")[1].split("\nEvery op takes")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = {name for cell in first_cells for name in re.findall(r"`(\w+)", cell)}
    assert len(names) > 10
    assert [name for name in names if not hasattr(jax_ops, name)] == []


def test_every_public_name_is_listed():
    listed = set(re.findall(r"(?:`|jax_ops\.)(\w+)", README))
    assert set(jax_ops.__all__) - listed == {"device_from_jax"}


def test_commands_it_names_exist():
    named = set(re.findall(r"python -m jax_ops (\w+)", README))
    assert named and named <= set(COMMANDS)
    targets = set(re.findall(r"make ([\w-]+)", README))
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
