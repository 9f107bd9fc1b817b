"""loadbench.py says both rates of one model, and names a model that is not there."""

import re

import loadbench

from tests.golden.weights import write_checkpoint


def test_both_rates_are_printed_with_their_units(tmp_path, capsys):
    assert loadbench.main([str(write_checkpoint(tmp_path / "m", "llama_tied"))]) == 0
    said = capsys.readouterr().out
    assert re.search(r"plain read +[\d.]+ s +\d+ MB/s of file", said)
    assert re.search(r"load +[\d.]+ s +\d+ MB/s of file, \d+ MB/s of weights", said)


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert loadbench.main([str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
