"""The README's library section does what it says."""

import re
from pathlib import Path

import pytest

from tests.demo_model import demo_path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def library_examples() -> list[str]:
    section = README.split("## As a library\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


def test_best_of_n_by_hand_is_twenty_lines_or_so():
    _, by_hand = library_examples()
    assert len([line for line in by_hand.splitlines() if line.strip()]) <= 22


@pytest.mark.demo
@pytest.mark.timeout(600)
def test_the_librarys_examples_run_as_printed(capsys):
    demo_path()
    engine, by_hand = library_examples()
    exec(engine, {})
    first, second = eval(capsys.readouterr().out.strip().splitlines()[-1])
    assert first
    assert "4, 5" in second
    names: dict = {}
    exec(by_hand, names)
    assert all(1 <= len(row) <= 16 for row in names["rows"])
    assert len({tuple(token for token, _ in row) for row in names["rows"]}) > 1
    assert capsys.readouterr().out.strip()
