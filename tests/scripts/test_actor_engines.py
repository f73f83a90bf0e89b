"""The paths that ``bench_actor.py`` compares, as they are written on its command line."""

import argparse

import pytest
from benchmarks.actor_engines import EnginePath


def test_a_path_is_read_as_it_is_written_and_names_its_strategy() -> None:
    for text in ("rmpad", "rmpad/fsdp", "packed/fsdp:carry=never@12288", "packed:compile_layers=False"):
        assert str(EnginePath.parse(text)) == text
    assert EnginePath.parse("packed/fsdp").strategy == "fsdp"
    assert EnginePath.parse("packed").strategy == "fsdp2"
    for text in ("packed/ddp", "rmpad:carry=never", "flat"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            EnginePath.parse(text)
