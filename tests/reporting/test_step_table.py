"""The console of a training: one short line for each step."""

from __future__ import annotations

import io

from tests.reporting.test_gain import STEP
from verl_pg_plugin.reporting.step_table import HEADER_EVERY, StepTable

TRAINED = {**STEP, "critic/score/mean": 0.5, "prompt_length/mean": 131.2, "response_length/mean": 8.0}


def lines_of(table: StepTable) -> list[str]:
    assert isinstance(table.stream, io.StringIO)
    return table.stream.getvalue().splitlines()


def make_table(total_steps: int | None = 40) -> tuple[StepTable, list[float]]:
    seconds = [0.0]
    return StepTable(total_steps, io.StringIO(), clock=lambda: seconds[0]), seconds


def test_a_step_is_a_line_under_its_header_with_a_bar_and_the_time_that_is_left() -> None:
    table, seconds = make_table()
    seconds[0] = 60.0
    table.log(TRAINED, step=1)
    header, line = lines_of(table)
    titles = "reward, prompt, response, dedup, saved, gen s, old s, update s, step s"
    assert header.split() == titles.replace(",", "").split()
    assert line.startswith("[..........] step  1/40 left  0:39:00")
    assert line.split()[-9:] == ["0.500", "131", "8", "4.00x", "75%", "50.0", "1.0", "4.0", "60.0"]
    assert len(header) == len(line)
    assert len(line) < 140


def test_the_bar_is_full_at_the_last_step() -> None:
    table, _ = make_table()
    table.log(TRAINED, step=40)
    assert lines_of(table)[-1].startswith("[##########] step 40/40 left  0:00:00")


def test_the_header_comes_again_after_a_page_and_when_columns_change() -> None:
    table, _ = make_table(None)
    for step in range(HEADER_EVERY + 1):
        table.log(TRAINED, step)
    table.log({**TRAINED, "timing_s/ref": 2.0}, step=99)
    headers = [number for number, line in enumerate(lines_of(table)) if "reward" in line]
    assert headers == [0, HEADER_EVERY + 1, HEADER_EVERY + 3]
    assert "ref s" in lines_of(table)[headers[-1]]


def test_validations_are_shown_alone_and_beside_a_step() -> None:
    table, _ = make_table()
    table.log({"val-core/sum/acc/mean@1": 0.25, "text": "left out"}, step=0)
    table.log({**TRAINED, "val-core/sum/acc/mean@1": 0.5, "val-aux/x": 1.0}, step=1)
    first, _, _, last = lines_of(table)
    assert first == "step 0: val-core/sum/acc/mean@1 0.25"
    assert last == "  val-core/sum/acc/mean@1 0.5"


def test_the_gain_follows_the_last_step() -> None:
    table, _ = make_table()
    table.log(TRAINED, step=1)
    table.close()
    assert lines_of(table)[-3:] == table.gain.lines()
